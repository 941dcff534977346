"""Samples as the data of a training client. Needs neither torch nor an SDK.

A datum has the input tokens and, aligned with them, the tokens to predict and the inputs of the loss. Everything is shifted by
one: position i predicts token i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..collection.groups import Group
from ..collection.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Datum:
    """A training sequence. ``mask`` is 1 if the target was sampled and is trained.

    ``fresh`` is True where the token was sampled from the weights and the distribution in training, so that sampler and trainer
    must agree on its logprob. Where the mask is 0, logprobs and advantages are 0 and mean nothing.
    Shapes: all (T - 1,).
    """

    tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    mask: list[int]
    fresh: list[bool]

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


def to_datum(sample: Sample, *, version: int | None = None, cut: bool = False) -> Datum:
    """Convert one sample to a datum.

    ``version`` is that of the weights in training. With None, no token counts as sampled from older ones. ``cut``: the
    rollout sampled from a cut distribution (top_p and others), whose logprobs differ from the trainer's at equal weights.
    A loss sums over tokens, so every sampled token counts once and a forked episode needs no weight.
    """
    tokens = sample.token_ids
    context = len(sample.prompt_ids) - 1
    return Datum(
        tokens=tokens[:-1],
        target_tokens=tokens[1:],
        logprobs=[0.0] * context + [0.0 if lp is None else lp for lp in sample.response_logprobs],
        advantages=[0.0] * context + sample.advantages,
        mask=[0] * context + sample.response_mask,
        fresh=[False] * context + [fresh and not cut for fresh in _fresh(sample, version)],
    )


def _fresh(sample: Sample, version: int | None) -> list[bool]:
    """Mark the tokens of model calls whose tokens are all from the weights of this version.

    A call that continued with new weights has the attention cache of the old ones. Shapes: -> (R,).
    """
    found: list[bool] = []
    tokens = zip(sample.response_mask, sample.weight_versions, strict=True)
    for sampled, call in groupby(tokens, key=lambda token: token[0]):
        versions = [v for _, v in call]
        found += [bool(sampled) and (version is None or set(versions) == {version})] * len(versions)
    return found


def to_data(
    samples: Sequence[Sample],
    groups: Sequence[Group] = (),
    *,
    version: int | None = None,
    equal: bool = False,
) -> list[tuple[Datum, Sample]]:
    """Convert the samples that teach something. Return each datum with its sample.

    Equal rewards give no gradient, so samples whose advantages are all 0 are left out, unless ``equal`` is set. ``groups`` are
    those of the samples, and show which rollouts sampled from a cut distribution.
    """
    cut = {
        r.session_id
        for g in groups
        for r in g.usable
        if r.trajectory is not None and r.trajectory.report.other_sampling
    }
    return [(to_datum(s, version=version, cut=s.session_id in cut), s) for s in samples if equal or any(s.advantages)]


def datum_of(tokens: list[int], inputs: Mapping[str, list[Any]]) -> Datum:
    """Make a datum of inputs with the names in services' APIs, one value per token. No token counts as fresh."""
    zeros = [0.0] * len(tokens)
    return Datum(
        tokens=tokens,
        target_tokens=inputs["target_tokens"],
        logprobs=inputs.get("logprobs", zeros),
        advantages=inputs.get("advantages", zeros),
        mask=inputs.get("weights", [1] * len(tokens)),
        fresh=[False] * len(tokens),
    )
