"""Checks by the logprobs of rollouts whether weights that a trainer moved by itself have arrived.

Trainers that bring their own transfer (NCCL) leave no engine of ours to probe. But each of their batches has the logprobs that
tokens were sampled with, and the trainer computes its own of the same tokens. With the same weights on both sides these differ
by rounding: 1e-5 in float32; on average 0.005 to 0.05 a token in bfloat16. An engine that kept its first weights, another
checkpoint, or a matrix that it packs for its kernels, gives a larger difference, which grows with every step. The mean is
compared: in bfloat16 the largest difference of thousands of tokens is always large.

This finds the faults that ruin a run. In bfloat16 it does not find one matrix that is a single step old; `publishing.prove`
does, and needs the engine.
"""

from __future__ import annotations

from ..errors import WeightsError
from .publishing import PAGE

MAX_MEAN_GAP = 0.2  # nats a token; fp8 and mixtures of experts show up to 0.1


def check_arrived(
    gap_sum: float, tokens: float, version: int | None, max_mean_gap: float | None = MAX_MEAN_GAP
) -> float | None:
    """Return the mean difference between recorded and the trainer's logprobs of the same weights. None without a token.

    ``gap_sum`` is the sum of the absolute differences of ``tokens`` tokens. ``max_mean_gap`` None accepts every mean.
    Units: nats. Raises: WeightsError when the mean is above ``max_mean_gap``, or NaN.
    """
    if not tokens:
        return None
    mean = gap_sum / tokens
    if max_mean_gap is not None and not mean <= max_mean_gap:
        of = "" if version is None else f" of version {version}"
        raise WeightsError(
            f"the weights did not arrive: the logprobs recorded by the engine and the trainer's own{of} differ by {mean:.2g} on "
            f"average over {tokens:.0f} tokens (at most {max_mean_gap:g}); the run stops, because it would train on tokens of "
            f"other weights. See {PAGE}"
        )
    return mean
