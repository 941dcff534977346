"""How often the 95 % confidence interval of a mean reward covers the mean, by simulation.

python benchmarks/intervals.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from agentcore_rl_toolkit.client.evaluation import interval

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


def main() -> None:
    """Print the coverage and the mean width for each distribution and size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="500 samples in place of 2,000")
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    a = parser.parse_args()
    samples, rows, checks = 500 if a.quick else 2000, [], []
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
    if a.json is not None:
        a.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=2) + "\n")


if __name__ == "__main__":
    main()
