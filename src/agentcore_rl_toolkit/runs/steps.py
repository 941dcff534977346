"""The summary of a step: counts, means and spreads of its rollouts.

The writer keeps the summaries of steps that have ended, so that a page of a large run reads no rollouts. A change to a rollout
removes the summary of its step. A reader computes the summaries that are missing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from ..stats.intervals import interval
from .schema import COLUMNS

QUANTILES = (0.1, 0.5, 0.9)
COMPARED = (None, "no_spread", "filtered")  # reasons of masks that leave a group as it is, or leave all of it out
# Names of a summary, and the column whose known values they are of. Of no values, they are None.
_MEANS = {
    **{name: name for name in ("turns", "tool_calls", "staleness", "gap_mean", "elapsed_s")},
    **{"tokens_mean": "sampled_tokens", "entropy": "entropy_mean"},
}
_MOST = {
    **{"tokens_max": "sampled_tokens", "staleness_max": "staleness", "gap_max": "gap_max"},
    **{"elapsed_max_s": "elapsed_s", "last_s": "ended_s"},
}
_OF_A_TOOL = ("calls", "errors", "seconds", "rollouts", "score", "scored")

Select = Callable[[str, Sequence[Any]], Iterable[Any]]


def summarize(select: Select, phase: str, step: int | None) -> dict[str, Any]:
    """Return the summary of a step, empty if the step has no rollout. ``select`` executes a query with its values.

    Rewards are means over inputs, as in an evaluation: an input counts once, however many of its rollouts are scored. The groups
    differ, or all their rewards are equal: 0 or less (failed), 1 or more (solved), or between. Only rollouts that are trained are
    compared, and those of groups that were left out because they teach nothing.
    """
    rows = list(select(f"SELECT id, {', '.join(COLUMNS)} FROM rollouts WHERE phase = ? AND step IS ?", (phase, step)))
    if not rows:
        return {}
    columns = dict(zip(("id", *COLUMNS), zip(*rows, strict=True), strict=True))
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    usable = [reason is None for reason in columns["mask_reason"]]
    ended_ok = zip(columns["outcome"], columns["grp"], columns["reward"], strict=True)
    means = [fmean(each) for each in _by_group(zip(columns["grp"], columns["score"], strict=True))]
    each = zip(columns["grp"], columns["reward"], columns["mask_reason"], strict=True)
    groups = _by_group((group, reward) for group, reward, reason in each if reason in COMPARED)
    equal = [each[0] for each in groups if min(each) == max(each)]
    scores = sorted(known["score"])
    starts = zip(columns["ended_s"], columns["elapsed_s"], strict=True)

    def usable_sum(name: str) -> int | None:
        values = [v for v, fits in zip(columns[name], usable, strict=True) if fits and v is not None]
        return sum(values) if values else None

    return {
        "phase": phase,
        "step": step,
        "first": min(columns["id"]),
        "rollouts": len(usable),
        "scored": len(scores),
        "score": sum(scores),
        "usable": sum(usable),
        "reward": mean(means),
        "reward_ok": mean([fmean(each) for each in _by_group((g, r) for o, g, r in ended_ok if o == "ok")]),
        "reward_spread": pstdev(means) if means else None,
        "interval": interval(means) if means else None,
        "quantiles": [scores[int(q * (len(scores) - 1) + 0.5)] for q in QUANTILES] if scores else None,
        "groups": len(groups),
        "groups_differ": len(groups) - len(equal),
        "groups_failed": sum(reward <= 0 for reward in equal),
        "groups_solved": sum(reward >= 1 for reward in equal),
        "sampled_tokens": sum(known["sampled_tokens"]) if known["sampled_tokens"] else None,
        "usable_tokens": usable_sum("trained_tokens"),
        "gradient_tokens": usable_sum("gradient_tokens"),
        "cut": sum(n > 0 for n in known["cut_calls"]),
        "unparsed": sum(n > 0 for n in known["unparsed_calls"]),
        "first_s": min((ended - (took or 0.0) for ended, took in starts if ended is not None), default=None),
        **{name: mean(known[column]) for name, column in _MEANS.items()},
        **{name: max(known[column], default=None) for name, column in _MOST.items()},
        **{f"{name}s": dict(Counter(known[name])) for name in ("outcome", "cause", "stop")},
        "tools": _tools(columns),
    }


def _tools(columns: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Sum up the calls of each tool, and the scores of the rollouts that called it."""
    found: dict[str, dict[str, Any]] = {}
    for tools, score in zip(columns["tools"], columns["score"], strict=True):
        for name, facts in json.loads(tools or "{}").items():
            sums = found.setdefault(name, dict.fromkeys(_OF_A_TOOL, 0))
            for key, value in zip(_OF_A_TOOL, (*facts, 1, score or 0.0, score is not None), strict=True):
                sums[key] += value
    return found


def _by_group(rewards: Iterable[tuple[str, float | None]]) -> list[list[float]]:
    """Return the known rewards of each group that has one."""
    found: dict[str, list[float]] = {}
    for group, reward in rewards:
        if reward is not None:
            found.setdefault(group, []).append(reward)
    return list(found.values())


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return fmean(values) if values else None
