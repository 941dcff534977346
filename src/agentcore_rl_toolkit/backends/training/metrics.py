"""The numbers of a training step. Lists and arithmetic only: every training client that returns logprobs gets them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from ...client.evaluation import metrics_of
from ...policy.losses import bounds_of
from ...runs.record import tools_of
from ...runs.steps import mean
from ..collection.groups import CollectedRollout, Group, summarize
from ..collection.samples import Sample
from .batch import Datum
from .client import Loss, Passed

SO_FAR = ("peak_memory_gb", "billed_")  # beginnings of the names of numbers of the run so far


class Sums:
    """Sums over the trained tokens of a step, over all minibatches.

    `clip_fraction` counts the tokens that the clip keeps from moving further, because their clipped term is the smaller one, and
    tokens with a loss that `dual_clip` limits. With the loss cispo, it counts the tokens whose ratio is clipped.
    `kl_sampler` estimates KL(sampler || policy in training) per token (the k3 estimator, joschu.net/blog/kl-approx.html).
    """

    def __init__(self, loss: Loss) -> None:
        self._low, self._high = bounds_of(loss.options)
        self._dual = loss.options.get("dual_clip", math.inf)
        self._loss = loss.name
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._ratio_max: float | None = None
        self._gap: float | None = None
        self._service: dict[str, list[float]] = {}  # one value per minibatch
        self._tokens: list[int] = []  # a count per minibatch

    def add(
        self, data: Sequence[Datum], passed: Passed, stepped: Mapping[str, float], minibatches: int, *, check_gap: bool
    ) -> float | None:
        """Add a minibatch. Returns the largest gap between recorded and recomputed logprobs at equal weights, if it is known."""
        for name, value in {**passed.metrics, **stepped}.items():
            self._service.setdefault(name, []).append(value)
        self._tokens.append(sum(datum.trained_tokens for datum in data))
        self._sums["minibatches"] = minibatches
        for datum, logprobs_T in zip(data, passed.logprobs or (), strict=passed.logprobs is not None):
            for m, fresh, new, old, A in zip(
                datum.mask, datum.fresh, logprobs_T, datum.logprobs, datum.advantages, strict=True
            ):
                if m:
                    self._add_token(new - old, A, fresh and check_gap)
        for datum, entropies_T in zip(data, passed.entropies or (), strict=passed.entropies is not None):
            self._sums["entropy"] += math.fsum(e for m, e in zip(datum.mask, entropies_T, strict=True) if m)
        return self._gap if check_gap else None

    def _add_token(self, log_ratio: float, advantage: float, fresh: bool) -> None:
        if fresh:
            gap = abs(log_ratio)
            self._gap = gap if self._gap is None or not gap <= self._gap else self._gap  # NaN stays
        ratio = math.exp(min(log_ratio, 700.0))
        clipped = min(max(ratio, self._low), self._high)
        self._sums["tokens"] += 1
        self._sums["kl_sampler"] += ratio - 1 - log_ratio
        limited = clipped * advantage < ratio * advantage or (advantage < 0 and ratio > self._dual)
        self._sums["clipped"] += limited if self._loss == "ppo" else clipped != ratio and advantage != 0
        self._ratio_max = ratio if self._ratio_max is None else max(ratio, self._ratio_max)

    def metrics(self) -> dict[str, float | None]:
        """Return the step's metrics. They are None if nothing was trained or the service gives no logprobs."""
        tokens = self._sums["tokens"]
        found: dict[str, float | None] = {"loss": None, "grad_norm": None}
        found |= {name: _joined(name, values) for name, values in self._service.items()}
        if (losses := self._service.get("loss")) is not None:
            found["loss"] = math.fsum(losses) / self._sums["minibatches"]
        if (means := self._service.get("kl_start")) is not None:
            found["kl_start"] = fmean(means, weights=self._tokens)
        return found | {
            "logprob_gap": self._gap,
            "kl_sampler": self._sums["kl_sampler"] / tokens if tokens else None,
            "clip_fraction": self._sums["clipped"] / tokens if tokens and self._loss in ("ppo", "cispo") else None,
            "ratio_max": self._ratio_max,
            "entropy": self._sums["entropy"] / tokens if tokens and "entropy" in self._sums else None,
        }


def _joined(name: str, values: Sequence[float]) -> float:
    """Join a number of the minibatches of a step. Those of the run so far grow, those with this end are sums."""
    if name.startswith(SO_FAR):
        return max(values)
    return math.fsum(values) / (1 if name.endswith(":sum") else len(values))


def ages_of(sample: Sample, version: int) -> int:
    """Count the weight versions since the oldest token of a sample. Return 0 if its version is unknown."""
    versions = sample.version_range
    return 0 if versions is None else version - versions[0]


def staleness(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Count the usable rollouts by their age in weight versions. The mean is None if the engine reports no versions."""
    ages = Counter(version - r.weight_version_min for g in groups for r in g.usable if r.weight_version_min is not None)
    return {"staleness": {str(age): ages[age] for age in sorted(ages)}, "staleness_mean": mean([*ages.elements()])}


def group_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the metrics of groups of rollouts, as in `docs/metrics.md`. A mean of nothing is None, not zero."""
    stats = summarize(groups)
    good = [rollout for group in groups for rollout in group.usable]
    reports = [rollout.trajectory.report for rollout in good if rollout.trajectory is not None]
    tools = [used for rollout in good if (used := used_a_tool(rollout)) is not None]
    scored = [(g, s) for g in groups if (s := [r.score for r in g.rollouts if r.score is not None])]
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for group, scores in scored:
        if (source := group.request.payload.get("data_source")) is not None:
            by_source[str(source)].append(fmean(scores))
    return {
        **stats.evaluation(),
        "reward_spread": pstdev(fmean(scores) for _, scores in scored) if scored else None,
        "reward_spread_within": mean([pstdev(scores) for _, scores in scored]),
        "groups_all_solved": mean([min(scores) >= 1 for _, scores in scored]),
        "groups_all_failed": mean([max(scores) <= 0 for _, scores in scored]),
        **({"reward_by_source": {source: fmean(means) for source, means in by_source.items()}} if by_source else {}),
        "groups": stats.groups,
        "rollouts": stats.rollouts,
        "usable": stats.usable,
        "sampled_tokens": sum(r.trajectory.report.sampled_tokens for g in groups for r in g.rollouts if r.trajectory),
        "usable_tokens": stats.trained_tokens,
        "turns_mean": mean([report.turns for report in reports]),
        "response_tokens_mean": mean([report.sampled_tokens for report in reports]),
        "response_tokens_max": max((report.sampled_tokens for report in reports), default=None),
        "tool_use": mean(tools),
        "branches": sum(report.branches for report in reports),
    }


def used_a_tool(rollout: CollectedRollout) -> bool | None:
    """Count with the agent's own metrics, otherwise with its dialogue. Return None if its model calls offered no tools."""
    if (calls := metrics_of(rollout.record).get("tool_calls")) is not None:
        return calls > 0
    capture = rollout.capture
    return bool(tools_of(capture.dialogue)) if capture and any(turn.tools for turn in capture.turns) else None
