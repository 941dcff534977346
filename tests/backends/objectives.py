"""One recorded batch, and the gradient that a clipped policy loss has on it by the formula of docs/algorithms.md.

Each trainer's own loss code gets the batch, and its gradient for the logprobs is compared with `gradient`. Needs torch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

T = 12
ROLLOUT_OF_ROW = (0, 0, 1, 2)  # the first two sequences are of one forked rollout; the last row is masked


@dataclass(frozen=True)
class Batch:
    """Shapes: (B, T), advantages (B,). The ratios new / old and new / sampled reach beyond every clip, on both sides."""

    new: torch.Tensor
    old: torch.Tensor
    sampled: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor


def batch() -> Batch:
    """Return the same batch every time."""
    random = torch.Generator().manual_seed(7)
    new = -3 * torch.rand(4, T, generator=random)
    old = new + 0.6 * torch.randn(4, T, generator=random)
    old[0, 0] = new[0, 0] - 2.0  # a bad token that is 7 times as likely as before
    mask = (torch.rand(4, T, generator=random) > 0.25).float()
    mask[0, 0], mask[1, T // 2 :], mask[3] = 1, 0, 0
    sampled = old + 0.3 * torch.randn(4, T, generator=random)
    return Batch(new, old, sampled, mask, torch.tensor([-1.0, -1.0, 1.5, 0.7]))


def gradient(
    batch: Batch,
    *,
    against: torch.Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    correction: torch.Tensor | None = None,
    per_rollout: bool = False,
) -> torch.Tensor:
    """d loss / d logprob of each token, for r_t = exp(new_t - against_t).

    - w_t c_t A_t r_t, or 0 if the clip holds the token: A_t > 0 and r_t > 1 + high, A_t < 0 and r_t < 1 - low, or A_t < 0 and
    r_t > dual. c_t is the ``correction``. w_t is 1 / (tokens of the batch) or, with ``per_rollout``, 1 / (tokens of the
    rollout) / (number of rollouts).
    Shapes: (B, T).
    """
    ratio, A = (batch.new - against).exp(), batch.advantages[:, None]
    held = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low))
    if dual is not None:
        held |= (A < 0) & (ratio > dual)
    weight = batch.mask / batch.mask.sum()
    if per_rollout:
        rollouts = torch.tensor(ROLLOUT_OF_ROW)
        tokens = torch.zeros(max(ROLLOUT_OF_ROW) + 1).index_add(0, rollouts, batch.mask.sum(1))
        weight = batch.mask / tokens[rollouts].clamp(min=1)[:, None] / len(tokens)
    corrected = torch.ones_like(ratio) if correction is None else correction
    return torch.where(held, 0.0, -weight * corrected * A * ratio)


def truncated(numerator: torch.Tensor, denominator: torch.Tensor, most: float) -> torch.Tensor:
    """The weight of truncated importance sampling, exp(numerator - denominator), at most ``most``."""
    return (numerator - denominator).exp().clamp(max=most)
