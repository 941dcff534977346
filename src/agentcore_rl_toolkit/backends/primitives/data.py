"""Samples as the data of a training service. Needs no SDK.

A datum has the input tokens and, aligned with them, the tokens to predict and the inputs of the loss. Everything is shifted by
one: position i predicts token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ConfigError
from ..collection.samples import Sample


@dataclass(frozen=True, kw_only=True)
class Datum:
    """One training sequence for a policy gradient loss. ``mask`` is 1 where a sampled token is predicted.

    Shapes: all (T - 1,).
    """

    tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    mask: list[int]


def to_datum(sample: Sample, *, max_tokens: int | None = None) -> Datum | None:
    """The datum of one sample; None when the sample is longer than `max_tokens`.

    Context tokens have advantage 0, which is how the losses leave them out; their logprob is then irrelevant and
    written as 0. A service sums over tokens, so every sampled token counts once and a forked episode needs no weight.
    Raises: ConfigError when the sample has fewer than two tokens.
    """
    tokens = sample.token_ids
    if len(tokens) < 2 or not sample.prompt_ids:
        raise ConfigError(f"a sample needs a prompt and a response to predict, got {len(tokens)} tokens")
    if max_tokens is not None and len(tokens) > max_tokens:
        return None
    context = [0.0] * (len(sample.prompt_ids) - 1)
    return Datum(
        tokens=tokens[:-1],
        target_tokens=tokens[1:],
        logprobs=context + [0.0 if lp is None else lp for lp in sample.response_logprobs],
        advantages=context + sample.advantages,
        mask=[0] * len(context) + sample.response_mask,
    )


def to_data(samples: Sequence[Sample], *, max_tokens: int | None = None) -> tuple[list[Datum], list[Sample]]:
    """The data of the samples that are short enough, and these samples, in the same order."""
    pairs = [(to_datum(sample, max_tokens=max_tokens), sample) for sample in samples]
    return [d for d, _ in pairs if d is not None], [s for d, s in pairs if d is not None]
