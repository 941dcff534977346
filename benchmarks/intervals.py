"""How often the 95 % confidence intervals of a mean reward and of a paired difference cover the true value, by simulation.

The interval of a difference is compared with the score interval of Tango (1998), the best known one for rewards of 0 and 1.

python benchmarks/intervals.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.stats.differences import difference_interval
from agentcore_rl_toolkit.stats.intervals import Z_95, interval

SIZES = (10, 30, 100)
Draw = Callable[[random.Random], float]
DISTRIBUTIONS: dict[str, Draw] = {
    "0 or 1, 10 % ones": lambda r: float(r.random() < 0.1),
    "0 or 1, 50 % ones": lambda r: float(r.random() < 0.5),
    "0 or 1, 98 % ones": lambda r: float(r.random() < 0.98),
    "uniform": lambda r: r.random(),
    "thirds": lambda r: r.choice([0, 1 / 3, 2 / 3, 1]),
    "mostly 1, some partial": lambda r: r.betavariate(0.5, 0.1),
    "close to 0.9": lambda r: min(1.0, max(0.0, r.gauss(0.9, 0.05))),
}


PAIRED_SIZES = (30, 100, 300)
RATES = (0.05, 0.2, 0.5, 0.8, 0.95)
CORRELATIONS = (0.0, 0.3, 0.6, 0.9)


def single(samples: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Print coverage and mean width of the interval of a mean, for each distribution and size. Returns rows and checks."""
    rows: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    print(f"{'rewards':24} " + " ".join(f"{f'n = {n}':>16}" for n in SIZES) + "   (coverage, width)")
    for name, draw in DISTRIBUTIONS.items():
        r = random.Random(1)
        mean = statistics.fmean(draw(r) for _ in range(200_000))
        cells = []
        for n in SIZES:
            found = [interval([draw(r) for _ in range(n)]) for _ in range(samples)]
            covered = statistics.fmean(float(low <= mean <= high) for low, high in found if None not in (low, high))
            width = statistics.fmean(high - low for low, high in found if low is not None and high is not None)
            rows.append({"rewards": name, "n": n, "coverage": covered, "width": width})
            checks.append({"name": f"{name}, n = {n}", "value": covered, "target": 0.9, "ok": covered >= 0.9})
            cells.append(f"{covered:>8.3f} {width:>7.3f}")
        print(f"{name:24} " + " ".join(cells))
    return rows, checks


@cache
def ours(n: int, better: int, worse: int) -> tuple[float, float]:
    low, high = difference_interval([1.0] * better + [-1.0] * worse + [0.0] * (n - better - worse))
    assert low is not None
    assert high is not None
    return low, high


@cache
def tango(n: int, better: int, worse: int) -> tuple[float, float]:
    """The differences that the score test does not reject, by bisection. Source: Tango, Statistics in Medicine 17 (1998)."""

    def score(delta: float) -> float:
        linear = -better - worse + (2 * n - better + worse) * delta
        rate = (math.sqrt(max(0.0, linear**2 + 8 * n * worse * delta * (1 - delta))) - linear) / (4 * n)
        return (better - worse - n * delta) / math.sqrt(max(1e-12, n * (2 * rate + delta * (1 - delta))))

    ends = []
    for quantile in (Z_95, -Z_95):
        low, high = -1 + 1e-9, 1 - 1e-9
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > quantile else (low, middle)
        ends.append((low + high) / 2)
    return ends[0], ends[1]


def paired(samples: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Print coverage and width of the interval of a paired difference beside Tango's. Returns rows and checks."""
    rows: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    print(f"\n{'paired, 0 or 1':18} {'least':>8} {'mean':>8} {'most':>8} {'width':>8}   (coverage, width / Tango's)")
    for n in PAIRED_SIZES:
        found: dict[str, list[float]] = {"ours": [], "tango": [], "width": []}
        for before, after, correlation in itertools.product(RATES, RATES, CORRELATIONS):
            both = before * after + correlation * math.sqrt(before * (1 - before) * after * (1 - after))
            if both > min(before, after):
                continue  # no such pair of rates has this correlation
            r = random.Random(f"{n} {before} {after} {correlation}")
            kinds = r.choices((1, -1, 0), (after - both, before - both, 1 - before - after + 2 * both), k=n * samples)
            counts = [Counter(kinds[start : start + n]) for start in range(0, n * samples, n)]
            width = {}
            for name, method in (("ours", ours), ("tango", tango)):
                ends = [method(n, count[1], count[-1]) for count in counts]
                covered = statistics.fmean(low - 1e-9 <= after - before <= high + 1e-9 for low, high in ends)
                width[name] = statistics.fmean(high - low for low, high in ends)
                found[name].append(covered)
            found["width"].append(width["ours"] / width["tango"])
            rows.append(
                {"n": n, "before": before, "after": after, "correlation": correlation, "coverage": found["ours"][-1]}
            )
        for name in ("ours", "tango"):
            each, ratio = found[name], statistics.fmean(found["width"]) if name == "ours" else 1.0
            print(
                f"n = {n:<4} {name:9} {min(each):>8.3f} {statistics.fmean(each):>8.3f} {max(each):>8.3f} {ratio:>8.3f}"
            )
        mean, ratio = statistics.fmean(found["ours"]), statistics.fmean(found["width"])
        checks += [
            {
                "name": f"paired, n = {n}: mean coverage",
                "value": mean,
                "target": "0.93 to 0.97",
                "ok": 0.93 <= mean <= 0.97,
            },
            {
                "name": f"paired, n = {n}: least coverage",
                "value": min(found["ours"]),
                "target": 0.92,
                "ok": min(found["ours"]) >= 0.92,
            },
            {"name": f"paired, n = {n}: width / Tango's", "value": ratio, "target": 1.1, "ok": ratio <= 1.1},
        ]
    return rows, checks


def main() -> None:
    """Print the coverage and the mean width of the intervals."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="500 samples in place of 2,000")
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    a = parser.parse_args()
    samples = 500 if a.quick else 2000
    rows, checks = single(samples)
    more_rows, more_checks = paired(samples)
    if a.json is not None:
        a.json.write_text(json.dumps({"rows": rows + more_rows, "checks": checks + more_checks}, indent=2) + "\n")


if __name__ == "__main__":
    main()
