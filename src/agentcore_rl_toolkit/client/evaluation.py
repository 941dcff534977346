"""Evaluation: many rollouts of a data set, and what their rewards say."""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..contract import check_id, extract_reward
from ..errors import ConfigError, ContractError
from .batch import BatchItem

Z_95 = 1.959964  # normal quantile of a two-sided 95 % interval
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One line of the data set: the payload, and the id its rollouts are grouped by."""

    input_id: str
    payload: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """What an evaluation found. Rewards are None where no rollout has one; failures are counted, never scored.

    ``mean`` is the mean over inputs of the mean reward of an input's `ok` rollouts; ``low`` and ``high`` are its 95 % confidence
    interval: Wilson's where every input's mean is 0 or 1, else a bootstrap over inputs.
    """

    rollouts: int
    inputs: int
    outcomes: Mapping[str, int]
    rewarded: int
    without_reward: int
    mean: float | None
    low: float | None
    high: float | None
    solved_once: float | None
    elapsed_s: float

    @property
    def failures(self) -> int:
        """Rollouts that did not end `ok`, and `ok` ones without a reward."""
        return self.rollouts - self.rewarded

    def __str__(self) -> str:
        if self.mean is None or self.low is None or self.high is None:
            score = "no rollout has a reward"
        else:
            score = (
                f"reward {self.mean:.4f}  (95 % interval {self.low:.4f} to {self.high:.4f}, {self.rewarded} rollouts)"
            )
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.items()))
        extra = f", {self.without_reward} ok without a reward" if self.without_reward else ""
        return f"{score}\n{self.rollouts} rollouts of {self.inputs} inputs in {self.elapsed_s:.0f} s: {counts}{extra}"


def read_rows(path: Path, *, limit: int | None = None) -> list[EvalRow]:
    """Read a JSONL data set: each line is a payload. Its id is the field ``input_id`` or ``id``, else the line number.

    Raises: ConfigError that names the line.
    """
    rows: list[EvalRow] = []
    seen: set[str] = set()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if limit is not None and len(rows) >= limit:
                break
            try:
                payload = json.loads(line)
            except ValueError as e:
                raise ConfigError(f"{path}, line {number}: not JSON ({e})") from e
            if not isinstance(payload, dict):
                raise ConfigError(f"{path}, line {number}: must be an object, got {type(payload).__name__}")
            named = payload.get("input_id", payload.get("id"))
            input_id = f"line-{number:06d}" if named is None else str(named)
            try:
                check_id(input_id, "input_id")
            except ContractError as e:
                raise ConfigError(f"{path}, line {number}: {e}") from e
            if input_id in seen:
                raise ConfigError(f"{path}, line {number}: id {input_id!r} appears twice")
            seen.add(input_id)
            rows.append(EvalRow(input_id=input_id, payload=payload))
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def reward_of(item: BatchItem) -> float | None:
    """The reward of an item that ended `ok`; None for every other one, and where the agent gave none."""
    if not item.success or item.result is None:
        return None
    return extract_reward(item.result)


def summarise(items: Sequence[BatchItem], elapsed_s: float) -> EvalSummary:
    """Put items together. Failed rollouts are left out of the mean."""
    by_input: dict[str, list[float]] = {}
    rewarded = without = 0
    for item in items:
        reward = reward_of(item)
        if reward is not None:
            by_input.setdefault(str(item.input_id), []).append(reward)
            rewarded += 1
        elif item.success:
            without += 1
    means = [statistics.fmean(rewards) for rewards in by_input.values()]
    low, high = interval(means)
    return EvalSummary(
        rollouts=len(items),
        inputs=len({item.input_id for item in items}),
        outcomes=dict(Counter(str(item.outcome) for item in items)),
        rewarded=rewarded,
        without_reward=without,
        mean=statistics.fmean(means) if means else None,
        low=low,
        high=high,
        solved_once=statistics.fmean(max(r) >= 1.0 for r in by_input.values()) if by_input else None,
        elapsed_s=elapsed_s,
    )


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % confidence interval of a mean.

    Shapes: (N,) -> two numbers; (None, None) for N == 0.
    Source: Wilson (1927) for 0/1 values; percentile bootstrap (Efron 1979), seeded, otherwise.
    """
    n = len(values)
    if n == 0:
        return None, None
    mean = statistics.fmean(values)
    if all(value in (0.0, 1.0) for value in values):
        centre = (mean + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
        half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=n)) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def write_results(folder: Path, items: Iterable[BatchItem], summary: EvalSummary) -> None:
    """Write ``results.jsonl`` (with the records and tracebacks), ``results.csv`` (one line per rollout) and ``summary.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(items, key=lambda item: item.index or 0)
    columns = ("index", "input_id", "session_id", "outcome", "reward", "attempt", "elapsed_s", "error")
    with (folder / "results.jsonl").open("w") as lines, (folder / "results.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, columns)
        writer.writeheader()
        for item in ordered:
            entry = {
                "index": item.index,
                "input_id": item.input_id,
                "session_id": item.session_id,
                "outcome": None if item.outcome is None else item.outcome.value,
                "reward": reward_of(item),
                "attempt": item.attempt,
                "elapsed_s": item.elapsed,
                "error": item.error,
            }
            lines.write(json.dumps({**entry, "traceback": item.traceback, "record": item.result}) + "\n")
            writer.writerow(entry)
    (folder / "summary.json").write_text(json.dumps({**asdict(summary), "failures": summary.failures}, indent=2) + "\n")
