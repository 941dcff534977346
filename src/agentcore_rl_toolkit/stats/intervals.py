"""Confidence intervals of mean rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
