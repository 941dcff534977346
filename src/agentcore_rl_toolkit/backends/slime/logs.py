"""What slime logs of our rollouts: outcomes and causes beside its own metrics, and evaluations without masked rollouts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ...contract import Outcome
from .convert import NOTE

log = logging.getLogger(__name__)


def leave_masked_out(name: str, data: dict[str, dict[str, Any]], args: Any) -> None:
    """Leave in an evaluation set one row per usable rollout before slime averages it.

    Masked rollouts are taken out, a forked one keeps its first row. With slime's `log_passrate`, which wants
    `n_samples_per_eval_prompt` rows of each prompt, a prompt with a masked rollout is taken out whole. A set in which
    nothing is left has no mean: it is removed with a warning rather than reported as 0.
    """
    samples = list(data[name].get("samples") or [])
    kept = _kept(samples, args.n_samples_per_eval_prompt if getattr(args, "log_passrate", False) else 1)
    if samples and not kept:
        log.warning("evaluation %s: none of %d rollouts was usable", name, len(samples))
        del data[name]
    elif len(kept) < len(samples):
        for key, values in data[name].items():
            if isinstance(values, list) and len(values) == len(samples):
                data[name][key] = [values[i] for i in kept]


def _kept(samples: list[Any], group_size: int) -> list[int]:
    """Positions of each usable rollout's first sample; those of whole groups only when groups are larger than 1."""
    first: dict[Any, int] = {}
    for i, sample in enumerate(samples):
        if not sample.remove_sample:
            first.setdefault(sample.index if sample.index is not None else ("position", i), i)
    if group_size == 1:
        return list(first.values())
    groups: dict[int, list[int]] = {}
    for index, i in first.items():
        groups.setdefault(index // group_size, []).append(i)
    return [i for members in groups.values() if len(members) == group_size for i in members]


def outcome_metrics(samples: Iterable[Any]) -> dict[str, float]:
    """Counts over samples that `convert.to_slime` made, and means of the agents' own metrics over those that are
    trained; each rollout counts once.

    ``reward_all`` is the mean over all rollouts, failures of agent and policy as 0, those of the infrastructure left out
    (``scored`` says how many there are); ``reward_ok`` is the mean over those that ended `ok`. A mean of nothing is absent.
    """
    by_rollout = {s.metadata[NOTE]["session_id"]: s for s in samples if NOTE in (s.metadata or {})}
    outcomes = Counter(s.metadata[NOTE]["outcome"] for s in by_rollout.values())
    found = {f"outcome/{name}": float(n) for name, n in outcomes.items()}
    for key, label in (("cause", "cause"), ("failure", "policy_failure")):
        named = Counter(s.metadata[NOTE].get(key) for s in by_rollout.values())
        found |= {f"{label}/{name}": float(n) for name, n in named.items() if name is not None}
    scores = [
        (n["score"], n["outcome"]) for s in by_rollout.values() if (n := s.metadata[NOTE]).get("score") is not None
    ]
    ok = [score for score, outcome in scores if outcome == Outcome.OK]
    found["scored"] = float(len(scores))
    if scores:
        found["reward_all"] = sum(score for score, _ in scores) / len(scores)
    if ok:
        found["reward_ok"] = sum(ok) / len(ok)
    found["rollouts"] = float(len(by_rollout))
    found["masked"] = float(sum(bool(s.remove_sample) for s in by_rollout.values()))
    reported: dict[str, list[float]] = {}
    for sample in by_rollout.values():
        for name, value in () if sample.remove_sample else sample.metadata[NOTE].get("metrics", {}).items():
            reported.setdefault(name, []).append(value)
    found |= {f"metric/{name}": sum(values) / len(values) for name, values in reported.items()}
    found["forked"] = float(sum(s.metadata[NOTE].get("branches", 1) > 1 for s in by_rollout.values()))
    return found
