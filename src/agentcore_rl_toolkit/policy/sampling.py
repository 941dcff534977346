"""Chooses the next token of many sequences at once, each with its own settings.

Temperature 0 takes the largest logit of a row. Otherwise, logits are divided by the temperature and cut by ``min_p``, ``top_k``
and ``top_p``, one after the other, as in vLLM. Penalties and ``logit_bias`` have no effect: no trainer reproduces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from msgspec import Meta


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one completion. Names, meanings and bounds are vLLM's. Requests are checked against these types.

    ``temperature`` 0 takes the likeliest token. ``top_k`` 0 or -1 and ``top_p`` 1 switch these cuts off. ``seed`` makes a
    completion repeatable whatever else is in the batch.

    ``min_p`` cuts tokens that are less likely than this share of the likeliest. ``prompt_logprobs`` 0 asks for the logprobs of
    the prompt's own tokens.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Sample one token per row. Shapes: N rows.

    Logprobs are those of the distribution that the token was sampled from: after temperature and cuts (vLLM's
    ``processed_logprobs``). At temperature 0 they are those of temperature 1, as vLLM's.
    """

    ids_N: list[int]
    logprobs_N: list[float]
    tensor_N: torch.Tensor


class Sampler:
    """The settings of the rows of a batch as tensors, built again only when the rows change."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        seeded: Sequence[torch.Generator | None],
        device: str = "cpu",
    ) -> None:
        # The likeliest token is taken at temperature 0: cuts mean nothing there, and its logprobs are those of temperature 1.
        sampled = [p if p.temperature else replace(p, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) for p in params]
        self._cuts = any(p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0 for p in sampled)
        self._plain = all(p.temperature == 1.0 for p in sampled)
        with torch.device(device):
            self._temperatures = torch.tensor([p.temperature for p in sampled])[:, None].clamp(min=1e-5)
            self._top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**30 for p in sampled])[:, None]
            # sums of probabilities may exceed 1 by rounding
            self._top_p = torch.tensor([p.top_p if p.top_p < 1.0 else 2.0 for p in sampled])[:, None]
            self._min_p = torch.tensor([p.min_p for p in sampled])[:, None]
            self._greedy = torch.tensor([p.temperature == 0.0 for p in params])
        self._any_greedy = any(p.temperature == 0.0 for p in params)
        self._seeded = [(row, g) for row, g in enumerate(seeded) if g is not None]

    @torch.inference_mode()
    def sample(self, logits_NV: torch.Tensor, generator: torch.Generator) -> Sampled:
        """Draw a token for each row; seeded rows draw from their own generators, the others from the shared one."""
        logprobs_NV = self._logprobs(logits_NV)
        uniform_N1 = torch.rand(logprobs_NV.shape[0], 1, generator=generator)
        for row, own in self._seeded:
            uniform_N1[row] = torch.rand(1, generator=own)
        uniform_N1 = uniform_N1.to(logits_NV.device)  # drawn on the CPU: the same numbers everywhere
        # Inverse transform. 1 - u lies in (0, 1], so a token of probability 0 can never be hit.
        cumulated_NV = logprobs_NV.exp().cumsum(-1)
        chosen_N = (cumulated_NV < (1 - uniform_N1) * cumulated_NV[:, -1:]).sum(-1)
        if self._any_greedy:
            chosen_N = torch.where(self._greedy, logits_NV.argmax(-1), chosen_N)
        picked_N = logprobs_NV.gather(1, chosen_N[:, None])[:, 0]
        return Sampled(ids_N=chosen_N.tolist(), logprobs_N=picked_N.tolist(), tensor_N=chosen_N)

    def _logprobs(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the logprobs from which to draw. Those of tokens that are cut off are minus infinity."""
        scaled_NV = logits_NV if self._plain else logits_NV / self._temperatures
        if not self._cuts:
            return torch.log_softmax(scaled_NV, -1)
        ordered = scaled_NV.sort(-1, descending=True)
        probabilities_NV = torch.softmax(ordered.values, -1)
        last_of_top_k_N1 = ordered.values.gather(-1, self._top_k.clamp(max=scaled_NV.shape[1]) - 1)
        kept_NV = probabilities_NV >= self._min_p * probabilities_NV[:, :1]
        kept_NV &= ordered.values >= last_of_top_k_N1  # as many more as are just as likely as the last
        probabilities_NV = probabilities_NV * kept_NV
        probabilities_NV /= probabilities_NV.sum(-1, keepdim=True)
        kept_NV &= probabilities_NV.cumsum(-1) - probabilities_NV < self._top_p
        kept_NV[:, 0] = True
        cut_NV = torch.ones_like(kept_NV).scatter(-1, ordered.indices, ~kept_NV)
        return torch.log_softmax(scaled_NV.masked_fill(cut_NV, -torch.inf), -1)


def seeded_generator(seed: int | None) -> torch.Generator | None:
    """Return a generator for one request, or None if it has no seed."""
    return None if seed is None else torch.Generator().manual_seed(seed % 2**63)
