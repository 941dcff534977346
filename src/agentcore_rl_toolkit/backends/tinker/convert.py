"""Samples -> Tinker data, as plain dicts. Needs no Tinker SDK.

Field names as of the Tinker SDK 0.38.0: a `Datum` has the input tokens and, aligned with them, the tokens to predict
and the inputs of the loss. Everything is shifted by one: position i predicts token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError
from ..collection.samples import Sample


def to_tinker(sample: Sample, *, max_tokens: int | None = None) -> dict[str, Any] | None:
    """`{"tokens": ..., "loss_fn_inputs": {...}, "mask": ...}` of one sample for the losses `importance_sampling` and `ppo`.

    Context tokens have advantage 0, which is how these losses leave them out; their logprob is then irrelevant and
    written as 0. The service sums over tokens, so every sampled token counts once and a forked episode needs no weight.
    None when the sample is longer than `max_tokens`.
    Shapes: all lists (T - 1,).
    Raises: ConfigError when the sample has fewer than two tokens.
    """
    tokens = sample.token_ids
    if len(tokens) < 2 or not sample.prompt_ids:
        raise ConfigError(f"a sample needs a prompt and a response to predict, got {len(tokens)} tokens")
    if max_tokens is not None and len(tokens) > max_tokens:
        return None
    context = [0.0] * (len(sample.prompt_ids) - 1)
    return {
        "tokens": tokens[:-1],
        "loss_fn_inputs": {
            "target_tokens": tokens[1:],
            "logprobs": context + [0.0 if lp is None else lp for lp in sample.response_logprobs],
            "advantages": context + [sample.advantage if m else 0.0 for m in sample.response_mask],
        },
        "mask": [0] * len(context) + sample.response_mask,
    }


def to_tinker_batch(
    samples: Sequence[Sample], *, max_tokens: int | None = None
) -> tuple[list[dict[str, Any]], list[Sample]]:
    """All samples as data, and those that were too long."""
    data, too_long = [], []
    for sample in samples:
        datum = to_tinker(sample, max_tokens=max_tokens)
        if datum is None:
            too_long.append(sample)
        else:
            data.append(datum)
    return data, too_long
