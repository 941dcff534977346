"""Advantages over one group of rollouts. Pure arithmetic on lists.

A masked rollout (late, failed, stale) is `None` in the rewards and stays `None` in the result: it neither gets an
advantage nor moves the group's mean or spread. Equal rewards give exactly 0, so that a trainer can leave their group out: in
floating point their mean may be off by one rounding, and so may rewards that were computed in different ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ...contract import is_finite, nearly_equal
from ...errors import ConfigError

Estimator = Literal["grpo", "dr_grpo", "rloo"]

STD_EPSILON = 1e-6  # slime and verl divide by (std + 1e-6); TRL uses 1e-4


def grpo(rewards_G: Sequence[float | None], *, epsilon: float = STD_EPSILON) -> list[float | None]:
    """Center the rewards on the mean of the usable ones and divide by their sample standard deviation.

    Shapes: (G,) -> (G,).   Units: standard deviations of the group.
    A group without spread, or with a single usable reward, gives 0.0 for its usable entries: nothing to learn from it.
    Raises: ConfigError on a reward that is not finite.  Source: GRPO, arXiv:2402.03300.
    """
    centred_G = dr_grpo(rewards_G)
    usable = [c for c in centred_G if c is not None]
    if len(usable) < 2:
        return centred_G
    std = math.sqrt(math.fsum(c * c for c in usable) / (len(usable) - 1))  # sample std, as in TRL, verl and slime
    if std <= epsilon:
        return [None if c is None else 0.0 for c in centred_G]
    return [None if c is None else c / (std + epsilon) for c in centred_G]


def dr_grpo(rewards_G: Sequence[float | None]) -> list[float | None]:
    """Subtract the mean of the usable rewards; no division by the spread.

    Shapes: (G,) -> (G,).   Units: reward points.
    Raises: ConfigError on a reward that is not finite.  Source: Dr. GRPO, arXiv:2503.20783.
    """
    usable = [r for r in rewards_G if r is not None]
    for r in usable:
        if not is_finite(r):
            raise ConfigError(f"reward {r!r} is not a finite number; mask the rollout (None) instead")
    if not usable:
        return [None] * len(rewards_G)
    if nearly_equal(usable):
        return [None if r is None else 0.0 for r in rewards_G]
    mean = math.fsum(usable) / len(usable)
    return [None if r is None else r - mean for r in rewards_G]


def rloo(rewards_G: Sequence[float | None]) -> list[float | None]:
    """Compare each usable reward with the mean of the *other* usable ones (leave one out).

    Shapes: (G,) -> (G,).   Units: reward points.
    A single usable reward has nothing to be compared with: its advantage is absent (None), not zero.
    Raises: ConfigError on a reward that is not finite.  Source: RLOO, arXiv:2402.14740.
    """
    centred_G = dr_grpo(rewards_G)
    n = len(rewards_G) - centred_G.count(None)
    return [None if c is None or n < 2 else c * n / (n - 1) for c in centred_G]


def advantages(rewards_G: Sequence[float | None], *, estimator: Estimator = "grpo") -> list[float | None]:
    """Return the advantages of a group by an estimator's name. Raises: ConfigError on a bad name or reward."""
    if estimator not in ESTIMATORS:
        raise ConfigError(f"unknown advantage estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[estimator](rewards_G)


ESTIMATORS: Mapping[str, Callable[[Sequence[float | None]], list[float | None]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
