"""Choosing the next token of many sequences at once, each with its own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. Names and meanings are vLLM's.

    ``temperature`` 0 takes the likeliest token. ``top_k`` 0 and ``top_p`` 1 switch these cuts off. ``seed`` makes a completion
    repeatable whatever else is in the batch. ``top_logprobs`` asks for that many alternatives per token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One token per row. Shapes: N rows; ``tops_N`` is None unless somebody asked, else per row (token id, logprob) pairs.

    Logprobs are those of the model's own distribution: log-softmax of the logits, before temperature, ``top_k`` and ``top_p``
    (vLLM's default, ``raw_logprobs``). At temperature 1 without cuts that is the distribution sampled from.
    """

    ids_N: list[int]
    logprobs_N: list[float]
    tops_N: list[list[tuple[int, float]]] | None
    tensor_N: torch.Tensor


class Sampler:
    """The settings of the rows of a batch as tensors, made anew only when the rows change."""

    def __init__(self, params: Sequence[SamplingParams], seeded: Sequence[torch.Generator | None]) -> None:
        self._plain = all(p.temperature == 1.0 and p.top_p >= 1.0 and p.top_k <= 0 for p in params)
        self._temperatures = torch.tensor([p.temperature for p in params])[:, None]
        self._greedy = self._temperatures[:, 0] == 0.0
        self._any_greedy = bool(self._greedy.any())
        self._top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**30 for p in params])[:, None]
        self._top_p = torch.tensor([p.top_p for p in params])[:, None]
        self._cuts = any(p.top_p < 1.0 or p.top_k > 0 for p in params)
        self._seeded = [(row, g) for row, g in enumerate(seeded) if g is not None]
        self._tops = [p.top_logprobs for p in params]
        self._most_tops = max(self._tops, default=0)

    @torch.inference_mode()
    def sample(self, logits_NV: torch.Tensor, generator: torch.Generator) -> Sampled:
        """Draw a token for each row; seeded rows draw from their own generators, the others from the shared one."""
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        uniform_N1 = torch.rand(logprobs_NV.shape[0], 1, generator=generator)
        for row, own in self._seeded:
            uniform_N1[row] = torch.rand(1, generator=own)
        # Inverse transform. 1 - u lies in (0, 1], so a token of probability 0 can never be hit.
        cumulated_NV = self._distribution(logprobs_NV).cumsum(-1)
        chosen_N = (cumulated_NV < (1 - uniform_N1) * cumulated_NV[:, -1:]).sum(-1)
        if self._any_greedy:
            chosen_N = torch.where(self._greedy, logits_NV.argmax(-1), chosen_N)
        picked_N = logprobs_NV.gather(1, chosen_N[:, None])[:, 0]
        tops = None
        if self._most_tops:
            top = logprobs_NV.topk(min(self._most_tops, logprobs_NV.shape[1]), dim=-1)
            tops = [
                list(zip(ids[:n], values[:n], strict=True))
                for ids, values, n in zip(top.indices.tolist(), top.values.tolist(), self._tops, strict=True)
            ]
        return Sampled(ids_N=chosen_N.tolist(), logprobs_N=picked_N.tolist(), tops_N=tops, tensor_N=chosen_N)

    def _distribution(self, logprobs_NV: torch.Tensor) -> torch.Tensor:
        if self._plain:
            return logprobs_NV.exp()
        scaled_NV = logprobs_NV / self._temperatures.clamp(min=1e-5)
        if not self._cuts:
            return torch.softmax(scaled_NV, -1)
        ordered = scaled_NV.sort(-1, descending=True)
        probabilities_NV = torch.softmax(ordered.values, -1)
        before_NV = probabilities_NV.cumsum(-1) - probabilities_NV
        ranks = torch.arange(scaled_NV.shape[1])
        kept_NV = (ranks < self._top_k) & (before_NV < self._top_p)
        kept_NV[:, 0] = True
        return torch.zeros_like(scaled_NV).scatter(-1, ordered.indices, probabilities_NV * kept_NV)


def seeded_generator(seed: int | None) -> torch.Generator | None:
    """A generator of a request's own, or None when it has no seed."""
    return None if seed is None else torch.Generator().manual_seed(seed % 2**63)
