"""Confidence intervals of mean rewards, and pass rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

Z_95 = 1.959964  # normal quantile of a two-sided 95 % interval


def interval(values: Sequence[float], weight: float = Z_95**2 / 2) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of a mean of rewards.

    The values get ``weight`` further ones at each end of the range of rewards, which is 0 to 1 unless a value is outside of it.
    The interval is the normal one of all of them, within that range. For values of 0 and 1 and the default weight, it is that of
    Agresti and Coull. Equal values do not give a width of 0. `benchmarks/intervals.py` measures its coverage.

    Shapes: (N,) -> two numbers; (None, None) for N == 0.
    Source: Agresti and Coull, "Approximate is better than exact for interval estimation of binomial proportions" (1998).
    """
    if not values:
        return None, None
    least, most = min(0.0, *values), max(1.0, *values)
    total = len(values) + 2 * weight
    centre = (math.fsum(values) + weight * (least + most)) / total
    ends = weight * ((centre - least) ** 2 + (most - centre) ** 2)
    half = Z_95 / total * math.sqrt(math.fsum((value - centre) ** 2 for value in values) + ends)
    return max(least, centre - half), min(most, centre + half)


def pass_rates(scores: Iterable[Sequence[float]]) -> tuple[dict[int, float], dict[int, float]]:
    """Return pass@k and pass^k: the chances that one or all of k rollouts of an input are solved. Means over inputs.

    A rollout is solved with a reward of 1 or more. k is 1, 2, 4 and so on, and the most that an input has. Each k is over the
    inputs that have so many scored rollouts.
    Source: the unbiased estimator of pass@k, arXiv:2107.03374; pass^k, arXiv:2406.12045.
    """
    counts = [(len(each), sum(score >= 1.0 for score in each)) for each in scores if each]
    most = max((n for n, _ in counts), default=0)
    at: dict[int, float] = {}
    every: dict[int, float] = {}
    for k in sorted({2**power for power in range(most.bit_length())} | {most} - {0}):
        enough = [(n, solved) for n, solved in counts if n >= k]
        at[k] = statistics.fmean(1 - math.comb(n - solved, k) / math.comb(n, k) for n, solved in enough)
        every[k] = statistics.fmean(math.comb(solved, k) / math.comb(n, k) for n, solved in enough)
    return at, every
