"""Writes the rollouts of an evaluation into the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...backends.collection.recording import captured, input_key
from ...client import BatchItem
from ...client.evaluation import reward_of, score_of
from ...contract import DEFAULT_TRAIN, record_train
from ...errors import AgentCoreRLError
from ...runs import Rollout, RunWriter
from ...trajectory import Trajectory, build_trajectory

Fetch = Callable[[str], Any]  # what the gateway recorded of a session; None where it knows none


def keep(run: RunWriter, item: BatchItem, payload: Mapping[str, Any] | None, fetch: Fetch | None) -> None:
    """Write one rollout. What the gateway recorded is asked for on the writer's thread."""
    ended_s = time.time()

    def make() -> Rollout:
        return as_row(item, payload, _capture(item, fetch), ended_s)

    run.rollout(make)


def as_row(item: BatchItem, payload: Mapping[str, Any] | None, capture: Any, ended_s: float) -> Rollout:
    """The row of an item in the run's folder."""
    trajectory: Trajectory | None = None
    if capture is not None:
        try:
            trajectory = build_trajectory(
                capture.session_id, capture.turns, train=capture.train or record_train(item.result) or DEFAULT_TRAIN
            )
        except AgentCoreRLError:
            trajectory = None  # the dialogue is still worth reading
    metrics = (item.result or {}).get("metrics")
    named = metrics.items() if isinstance(metrics, Mapping) else ()
    return Rollout(
        session_id=item.session_id or f"index-{item.index}",
        phase="eval",
        group=str(item.input_id),
        input_key=input_key(payload) if payload is not None else None,
        place=item.index or 0,
        attempt=item.attempt,
        outcome=str(item.outcome),
        cause=None if item.cause is None else item.cause.value,
        failure=item.failure,
        reward=reward_of(item),
        score=score_of(item),
        elapsed_s=item.elapsed,
        ended_s=ended_s,
        error=item.error,
        traceback=item.traceback,
        payload=payload,
        record=item.result,
        metrics={str(k): float(v) for k, v in named if isinstance(v, (int, float))},
        stages=item.stages,
        **captured(capture, trajectory),
    )


def _capture(item: BatchItem, fetch: Fetch | None) -> Any:
    if fetch is None or item.session_id is None:
        return None
    try:
        return fetch(item.session_id)
    except (AgentCoreRLError, OSError):
        return None
