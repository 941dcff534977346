"""What slime logs about our rollouts: outcomes beside its own metrics, and evaluation means without masked rollouts.

Plugged in with ``--custom-rollout-log-function-path`` and ``--custom-eval-rollout-log-function-path``. Both leave
slime's own logging in place (they return False).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .convert import NOTE

log = logging.getLogger(__name__)


def log_rollouts(rollout_id: int, args: Any, samples: Any, extra: dict[str, Any] | None, rollout_time_s: float) -> bool:
    """Add counts by outcome, forks and the trained share of samples to the step's metrics."""
    metrics = outcome_metrics(_flat(samples))
    if extra is not None:
        extra.update({f"agentcore/{name}": value for name, value in metrics.items()})
    else:
        log.info("rollout %s: %s", rollout_id, metrics)
    return False


def log_eval(rollout_id: int, args: Any, data: dict[str, dict[str, Any]], extra: dict[str, Any] | None) -> bool:
    """Take masked rollouts out of every evaluation set before slime averages it; count them instead.

    A set in which nothing was usable has no mean: it is removed from the data with a warning rather than reported as 0.
    """
    for name in list(data):
        samples = list(data[name].get("samples") or [])
        kept = [i for i, s in enumerate(samples) if not s.remove_sample]
        if samples and extra is not None:
            extra.update({f"agentcore/eval/{name}/{k}": v for k, v in outcome_metrics(samples).items()})
        if samples and not kept:
            log.warning("evaluation %s of rollout %s: none of %d rollouts was usable", name, rollout_id, len(samples))
            del data[name]
        elif len(kept) < len(samples):
            for key, values in data[name].items():
                if isinstance(values, list) and len(values) == len(samples):
                    data[name][key] = [values[i] for i in kept]
    return False


def outcome_metrics(samples: Iterable[Any]) -> dict[str, float]:
    """Counts over samples that `convert.to_slime` made; each rollout counts once."""
    by_rollout = {s.metadata[NOTE]["session_id"]: s for s in samples if NOTE in (s.metadata or {})}
    outcomes = Counter(s.metadata[NOTE]["outcome"] for s in by_rollout.values())
    found = {f"outcome/{name}": float(n) for name, n in outcomes.items()}
    found["rollouts"] = float(len(by_rollout))
    found["masked"] = float(sum(bool(s.remove_sample) for s in by_rollout.values()))
    found["forked"] = float(sum(s.metadata[NOTE].get("branches", 1) > 1 for s in by_rollout.values()))
    return found


def _flat(samples: Any) -> list[Any]:
    if isinstance(samples, list):
        return [s for part in samples for s in _flat(part)]
    return [samples]
