"""Two evaluations of the same inputs: the difference of their rewards, how sure it is, and the inputs that changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .intervals import Z_95, interval

# Fewer changes may be chance even if all of them have one direction: 2 * 0.5 ** 5 > 5 %.
LEAST_CHANGED = 6
Z_80 = 0.841621  # normal quantile of a power of 80 %
_WEIGHT = 0.5  # weight of the further difference at each end; `benchmarks/intervals.py` compares it with others
_UNITS = range(1, 4_033)  # 64 * 63 is the last: rewards that are means of up to 64 rollouts have exact p values
_STEPS = 5_000_000  # about a second of work


def difference_interval(changes: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of a mean difference of paired rewards.

    The differences get half a further one at each end of their range, -1 and 1, and the interval is the normal one of all of
    them. For rewards of 0 and 1 it is close to that of Agresti and Min.

    Shapes: (N,) -> two numbers; (None, None) for N == 0.
    Source: Agresti and Min, "Simple improved confidence intervals for comparing matched proportions" (2005).
    """
    ends = interval([(change + 1) / 2 for change in changes], _WEIGHT)
    low, high = (None if end is None else 2 * end - 1 for end in ends)
    return low, high


def sign_flip_p(changes: Sequence[float]) -> float:
    """Return the two-sided p value of a mean difference, if each difference could as well have the other sign.

    For rewards of 0 and 1 this is the exact test of McNemar. Means of up to 64 rollouts are tested exactly, too. Others are
    rounded to thousandths of the largest difference. Where the exact test takes more than about a second, the sum of the
    differences is tested as normal.
    """
    moved = [abs(change) for change in changes if change]
    if not moved:
        return 1.0
    unit: float = next((n for n in _UNITS if all(abs(size * n - round(size * n)) < 1e-9 * n for size in moved)), 0)
    if not unit or sum(moved) * unit * len(moved) > _STEPS:
        unit = 1000 / max(moved)
    sizes = [round(size * unit) for size in moved]
    total = sum(sizes)
    if total * len(sizes) > _STEPS:
        return math.erfc(abs(math.fsum(changes)) / math.sqrt(2 * math.fsum(size**2 for size in moved)))
    ways = [1] + [0] * total  # ways[s]: choices of signs whose positive differences sum to s
    for size in sizes:
        for s in range(total, size - 1, -1):
            ways[s] += ways[s - size]
    observed = abs(sum(math.copysign(size, change) for size, change in zip(sizes, filter(None, changes), strict=True)))
    extreme = sum(count for s, count in enumerate(ways) if abs(2 * s - total) >= observed)
    return min(1.0, float(extreme / 2 ** len(sizes)))


def inputs_needed(changes: Sequence[float]) -> int | None:
    """Return how many inputs a test at the 5 % level needs to find this mean difference with a power of 80 %."""
    mean = statistics.fmean(changes) if changes else 0.0
    if abs(mean) < 1e-12 or len(changes) < 2:
        return None
    return math.ceil(((Z_95 + Z_80) / mean) ** 2 * statistics.variance(changes)) or 1


def change_of(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Compare the rewards of the same inputs before and after: the mean change, its 95 % confidence interval, a verdict.

    If at least `LEAST_CHANGED` inputs changed, the verdict is "learned" for an interval above 0, and "not learned" if no part of
    it is above 0. Otherwise it is "cannot tell". ``text`` is for people.
    """
    changes = [after - before for before, after in pairs]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    facts: dict[str, Any] = {"inputs": len(pairs), "better": better, "worse": worse, "verdict": "cannot tell"}
    low, high = difference_interval(changes)
    if low is None or high is None:
        return {**facts, "mean": None, "low": None, "high": None, "text": "cannot tell: no input has two rewards"}
    mean = statistics.fmean(changes)
    if better + worse >= LEAST_CHANGED and (low > 0 or high <= 0):
        facts["verdict"] = "learned" if low > 0 else "not learned"
    text = (
        f"{facts['verdict']}: on the same {len(pairs)} inputs the reward changed by {mean:+.3f} (95 % interval {low:+.3f} to "
        f"{high:+.3f}); {better} got better, {worse} got worse"
    )
    return {**facts, "mean": mean, "low": low, "high": high, "text": text}


def difference(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, Any]:
    """Compare the mean rewards of the inputs that both sides have, by the inputs' ids.

    Returns the numbers of `change_of`, the ``p`` value of `sign_flip_p` (None without an input), and `inputs_needed`.
    """
    pairs = [(a[name], b[name]) for name in a if name in b]
    changes = [after - before for before, after in pairs]
    facts = {name: value for name, value in change_of(pairs).items() if name not in ("verdict", "text")}
    return {**facts, "p": sign_flip_p(changes) if changes else None, "needed": inputs_needed(changes)}
