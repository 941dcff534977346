"""Evaluation: many rollouts of a data set, and the means of their rewards."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..contract import Cause, check_id, extract_reward, is_finite
from ..errors import ConfigError, ContractError
from ..stats.intervals import interval, pass_rates
from .batch import BatchItem
from .data import numbered_rows


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """A line of the data set: the payload, and the id that groups its rollouts."""

    input_id: str
    payload: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """The result of an evaluation. A mean of nothing is None.

    Attributes:
        mean: over the ``scored`` rollouts: failures of the agent and of the policy count as 0, those of the infrastructure and
            cancelled ones do not count.
        mean_ok: over the ``rewarded`` rollouts, which ended `ok` with a reward.
        low, high, low_ok, high_ok: 95 % confidence intervals over inputs (`interval`). Means are over inputs, too.
        causes, policy_failures: failures by cause, and the policy's by their kind.
        failures: rollouts that failed, without failures of the policy. Any of these shows that something is broken.
        pass_at, pass_all: `pass_rates`.
        metrics: means of the numbers that agents returned with the reward.
        errors: exceptions by class.
        judge: a judge's calls, tokens, cost and failures.
    """

    rollouts: int
    inputs: int
    outcomes: Mapping[str, int]
    causes: Mapping[str, int]
    policy_failures: Mapping[str, int]
    scored: int
    rewarded: int
    without_reward: int
    failures: int
    mean: float | None
    low: float | None
    high: float | None
    mean_ok: float | None
    low_ok: float | None
    high_ok: float | None
    elapsed_s: float
    pass_at: Mapping[int, float] = field(default_factory=dict)
    pass_all: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    judge: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = ["no rollout has a reward"]
        if self.mean is not None:
            span = f"95 % interval {self.low:.4f} to {self.high:.4f}"
            lines = [f"reward {self.mean:.4f}  ({span}, {self.scored} rollouts)"]
            if self.scored != self.rewarded:
                lines[0] += "; failures of agent and policy are 0"
                ok = "none" if self.mean_ok is None else f"{self.mean_ok:.4f}"
                if self.mean_ok is not None:
                    ok += f"  (95 % interval {self.low_ok:.4f} to {self.high_ok:.4f}, {self.rewarded} rollouts)"
                lines.append(f"reward of ok rollouts only {ok}")
        extra = f", {self.without_reward} ok without a reward" if self.without_reward else ""
        size = f"{self.rollouts} rollouts of {self.inputs} inputs in {self.elapsed_s:.0f} s"
        lines.append(f"{size}: {_counted(self.outcomes)}{extra}")
        if len(self.pass_at) > 1:
            for name, rates in (("pass@", self.pass_at), ("pass^", self.pass_all)):
                lines.append("  ".join(f"{name}{k} {rate:.4f}" for k, rate in rates.items()))
        if self.metrics:
            lines.append(f"metrics, mean of ok rollouts: {metrics_line(self.metrics)}")
        if self.errors:
            lines.append(f"exceptions: {_counted(self.errors)}")
        if self.policy_failures:
            lines.append(f"the policy failed: {_counted(self.policy_failures)}")
        if self.scored < self.rollouts:
            broken = self.causes.get(Cause.INFRASTRUCTURE, 0)
            why = f" ({broken} failed by the infrastructure)" if broken else ""
            lines.append(f"not scored: {self.rollouts - self.scored}{why}")
        if self.judge:
            lines.append("the judge: " + ", ".join(f"{n:g} {name.replace('_', ' ')}" for name, n in self.judge.items()))
        return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))


def read_rows(path: Path) -> list[EvalRow]:
    """Read a data set (`data.numbered_rows`). A row's id is its field ``input_id`` or ``id``, otherwise its line number.

    Raises: ConfigError that names the line.
    """
    rows: dict[str, EvalRow] = {}
    for number, payload in numbered_rows(path):
        named = payload.get("input_id", payload.get("id"))
        input_id = f"line-{number:06d}" if named is None else str(named)
        try:
            check_id(input_id, "input_id")
        except ContractError as e:
            raise ConfigError(f"{path}:{number}: {e}") from e
        if input_id in rows:
            raise ConfigError(f"{path}:{number}: id {input_id!r} appears twice")
        rows[input_id] = EvalRow(input_id=input_id, payload=payload)
    return list(rows.values())


def reward_of(item: BatchItem) -> float | None:
    """Return the reward of an item that ended `ok`, or None for every other item, and if the agent gave no reward."""
    if not item.success or item.result is None:
        return None
    return extract_reward(item.result)


def score_of(item: BatchItem) -> float | None:
    """Return an item's value in the headline mean: its reward, 0 if agent or policy failed, None if it is unknown."""
    if item.success:
        return reward_of(item)
    return 0.0 if item.cause in (Cause.AGENT, Cause.POLICY) else None


def metrics_of(record: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the finite numbers that an agent returned with the reward: in ``metrics``, or next to ``reward`` in ``rewards``."""
    record = record or {}
    raw, own = record.get("rewards", record.get("reward")), record.get("metrics")
    found = dict(own) if isinstance(own, Mapping) else {}
    found |= {name: value for name, value in raw.items() if name != "reward"} if isinstance(raw, Mapping) else {}
    return {str(k): float(v) for k, v in found.items() if isinstance(v, bool) or is_finite(v)}


def mean_metrics(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for metrics in each:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Format metrics, or return "" without any."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def error_type_of(item: BatchItem) -> str | None:
    """Return the class of the exception that an item's agent raised, or None where none is known."""
    kind = getattr(item.exception, "error_type", None) or (item.result or {}).get("error_type")
    return None if item.success or kind is None else str(kind)


def summarize(
    items: Sequence[BatchItem], elapsed_s: float, judge: Mapping[str, float] = MappingProxyType({})
) -> EvalSummary:
    """Put items together."""
    scores, rewards = _by_input(items, score_of), _by_input(items, reward_of)
    mean, low, high = _with_interval(scores)
    mean_ok, low_ok, high_ok = _with_interval(rewards)
    pass_at, pass_all = pass_rates(scores.values())
    causes = Counter(str(item.cause) for item in items if item.cause is not None)
    rewarded = sum(len(values) for values in rewards.values())
    return EvalSummary(
        rollouts=len(items),
        inputs=len({item.input_id for item in items}),
        outcomes=dict(Counter(str(item.outcome) for item in items)),
        causes=dict(causes),
        policy_failures=dict(Counter(item.failure for item in items if item.failure is not None)),
        scored=sum(len(values) for values in scores.values()),
        rewarded=rewarded,
        without_reward=sum(item.success and reward_of(item) is None for item in items),
        failures=len(items) - rewarded - causes[Cause.POLICY],
        mean=mean,
        low=low,
        high=high,
        mean_ok=mean_ok,
        low_ok=low_ok,
        high_ok=high_ok,
        elapsed_s=elapsed_s,
        pass_at=pass_at,
        pass_all=pass_all,
        metrics=mean_metrics(metrics_of(item.result) for item in items if item.success),
        errors=dict(Counter(kind for item in items if (kind := error_type_of(item)) is not None)),
        judge=dict(judge),
    )


def mean_over_inputs(values: Iterable[Sequence[float]]) -> float | None:
    """Return the mean over inputs of the mean of an input's values, or None for none."""
    means = [statistics.fmean(found) for found in values if found]
    return statistics.fmean(means) if means else None


def _by_input(items: Iterable[BatchItem], value_of: Callable[[BatchItem], float | None]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for item in items:
        if (value := value_of(item)) is not None:
            values.setdefault(str(item.input_id), []).append(value)
    return values


def _with_interval(values: Mapping[str, Sequence[float]]) -> tuple[float | None, float | None, float | None]:
    return (mean_over_inputs(values.values()), *interval([statistics.fmean(found) for found in values.values()]))


def write_results(folder: Path, items: Iterable[BatchItem], summary: EvalSummary) -> None:
    """Write ``results.jsonl`` (with the records and tracebacks), ``results.csv`` (one line per rollout) and ``summary.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("w") as lines, (folder / "results.csv").open("w", newline="") as table:
        columns = [*_entry(BatchItem(success=False)), *(f"metrics.{name}" for name in summary.metrics)]
        writer = csv.DictWriter(table, columns)
        writer.writeheader()
        for item in sorted(items, key=lambda item: item.index or 0):
            entry, metrics = _entry(item), metrics_of(item.result) if item.success else {}
            more = {"metrics": metrics, "traceback": item.traceback, "record": item.result}
            lines.write(json.dumps({**entry, **more}) + "\n")
            writer.writerow({**entry, **{f"metrics.{name}": value for name, value in metrics.items()}})
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")


def _entry(item: BatchItem) -> dict[str, Any]:
    return {
        "index": item.index,
        "input_id": item.input_id,
        "session_id": item.session_id,
        "outcome": None if item.outcome is None else item.outcome.value,
        "cause": None if item.cause is None else item.cause.value,
        "failure": item.failure,
        "reward": reward_of(item),
        "score": score_of(item),
        "attempt": item.attempt,
        "elapsed_s": item.elapsed,
        "error_type": error_type_of(item),
        "error": item.error,
    }
