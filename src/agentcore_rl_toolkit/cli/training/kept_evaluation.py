"""The rollouts of an evaluation in the run's folder, and a judge's rewards for them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...backends.collection.groups import CollectedRollout, Group, GroupRequest, read_reward, summarize
from ...backends.collection.judge import DECIDED_BY_THE_GATEWAY, end_of_calls, end_of_record
from ...backends.collection.recording import as_row
from ...backends.collection.scored import scored
from ...backends.llm_judge import JudgeSettings
from ...backends.scorer import Scorer
from ...client import BatchItem
from ...client.batch import error_line
from ...client.evaluation import metrics_of
from ...contract import DEFAULT_TRAIN, Cause, Outcome, extract_reward, record_train
from ...errors import AgentCoreRLError, RolloutLostError, ScorerError
from ...runs import Query, Rollout, RunReader, RunWriter
from ...runs.folder import ROLLOUTS
from ...trajectory import Trajectory, build_trajectory

Fetch = Callable[[str], Any]  # the gateway's record of a session, or None
Finished = tuple[BatchItem, CollectedRollout]


def finished_before(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rollouts that a run's folder holds, by session id, with their ``detail`` and without dialogue and tokens.

    Rollouts whose scorer failed are left out: they are scored again.
    """
    if not (folder / ROLLOUTS).exists():
        return {}
    with RunReader(folder) as run:
        kept = (run.rollout(rollout) or {} for rollout in run.ids(Query()))
        return {
            row["session_id"]: {**row, "dialogue": None, "sequences": None}
            for row in kept
            if row["cause"] != Cause.SCORER
        }


def as_before(item: BatchItem, row: Mapping[str, Any]) -> BatchItem:
    """Return an item of a resumed run as it was after `finish`."""
    detail, outcome = row["detail"] or {}, Outcome(row["outcome"])
    facts: dict[str, Any] = {"success": outcome is Outcome.OK, "outcome": outcome, "elapsed": row["elapsed_s"]}
    facts |= {"cause": row["cause"] and Cause(row["cause"]), "failure": row["failure"], "error": row["error"]}
    facts |= {"stages": detail.get("stages") or {}, "result": detail.get("record") or item.result}
    return dataclasses.replace(item, **facts)


def judge_items(
    run: RunWriter,
    finished: Sequence[Finished],
    payloads: Mapping[str, Mapping[str, Any]],
    settings: JudgeSettings,
    phase: str = "eval",
    step: int | None = None,
) -> tuple[list[BatchItem], Mapping[str, float]]:
    """Judge the rollouts of each input and write them again. Returns the items with these rewards in their records, and costs.

    The records have the judge's reasons too. If the judge fails, a record has no reward, and the item's ``error`` is the reason.
    """
    named = {item.index or 0: item for item, _ in finished}
    groups = {
        i: Group(input_id=i, rollouts=[], request=GroupRequest(input_id=i, payload=p)) for i, p in payloads.items()
    }
    for item, rollout in finished:
        if item.success:
            groups[str(item.input_id)].rollouts.append(rollout)

    async def every() -> list[Group]:
        return await asyncio.gather(*(scored(group, settings) for group in groups.values()))

    judged = asyncio.run(every())
    for group in judged:
        for rollout in group.rollouts:
            record = {k: v for k, v in (rollout.record or {}).items() if k not in ("rewards", "reward")}
            if rollout.reward_detail is not None:
                record["rewards"] = {"reward": rollout.reward, **rollout.reward_detail.metrics}
            if rollout.judge_score is not None:
                record["judge"] = rollout.judge_score.reason
            item = dataclasses.replace(named[rollout.index], result=record, error=rollout.reason)
            named[rollout.index] = item
            run.rollout(row_of(item, rollout, group.request.payload, phase, step))
    return list(named.values()), summarize(judged).judge


def finish(item: BatchItem, payload: Mapping[str, Any], fetch: Fetch | None, scorer: Scorer | None = None) -> Finished:
    """Score an item, and convert it to the rollout that trainers read. Block meanwhile.

    The scorer's reward replaces the agent's in the record, which becomes a metric. If the scorer fails, the record has no reward,
    and the item has the error and the cause `scorer`. If the gateway cannot be asked for the trajectory, the scorer is not
    called, and the cause is `infrastructure`. An agent may hide that its last model call failed: the gateway's record decides, as
    in a training.
    """
    capture: Any = None
    record = {k: v for k, v in (item.result or {}).items() if k not in ("rewards", "reward", "turn_rewards")}
    if item.result is not None and not item.success:  # the reason is that of a training
        ids = {"session_id": str(item.session_id), "input_id": str(item.input_id)}
        error = end_of_record(item.result, **ids, index=item.index or 0).error
        if error is not None and getattr(error, "outcome", None) == item.outcome:
            item = dataclasses.replace(item, exception=error, error=error_line(error))
    try:
        if fetch is not None and item.session_id is not None:
            capture = fetch(item.session_id)
        why, _ = end_of_calls(capture)
        if why is not None and item.outcome in DECIDED_BY_THE_GATEWAY:
            lost = RolloutLostError(why, session_id=item.session_id, input_id=item.input_id)
            about: dict[str, Any] = {"outcome": Outcome.LOST, "cause": Cause.INFRASTRUCTURE, "failure": None}
            item = dataclasses.replace(item, success=False, error=why, exception=lost, **about)
        elif scorer is not None and item.success and item.result is not None:
            found = asyncio.run(scorer.score(payload, item.result, getattr(capture, "dialogue", None) or ()))
            own = extract_reward(item.result)
            metrics = metrics_of(item.result) | ({} if own is None else {"agent_reward": own})
            item = dataclasses.replace(item, result={**record, "rewards": {**metrics, **found}})
    except (AgentCoreRLError, OSError) as e:
        if scorer is not None and item.success:
            ours = not isinstance(e, ScorerError)  # the gateway has ended
            trace = None if ours or e.__cause__ is None else "".join(traceback.format_exception(e.__cause__))
            failed: dict[str, Any] = {"cause": Cause.INFRASTRUCTURE if ours else Cause.SCORER, "traceback": trace}
            item = dataclasses.replace(item, result=record, error=error_line(e), exception=e, **failed)
    return item, _collected(item, capture)


def row_of(
    item: BatchItem, rollout: CollectedRollout, payload: Mapping[str, Any], phase: str = "eval", step: int | None = None
) -> Rollout:
    """Return the row of an item in the run's folder."""
    row = as_row(rollout, GroupRequest(input_id=str(item.input_id), payload=payload), phase=phase, step=step)
    return dataclasses.replace(row, attempt=item.attempt, error=item.error, traceback=item.traceback)


def _collected(item: BatchItem, capture: Any) -> CollectedRollout:
    trajectory: Trajectory | None = None
    if capture is not None:
        rule = capture.train or record_train(item.result) or DEFAULT_TRAIN
        with contextlib.suppress(AgentCoreRLError):  # the dialogue of turns that do not fit is still worth reading
            trajectory = build_trajectory(capture.session_id, capture.turns, train=rule, temperature=None)
    detail = read_reward(item.result) if item.success and item.result is not None else None
    return CollectedRollout(
        session_id=item.session_id or f"index-{item.index}",
        input_id=str(item.input_id),
        index=item.index or 0,
        outcome=item.outcome or Outcome.LOST,
        cause=item.cause,
        failure=item.failure,
        reward=None if detail is None else detail.value,
        reward_detail=detail,
        record=item.result,
        trajectory=trajectory,
        capture=capture,
        error=item.exception,
        elapsed_s=item.elapsed,
        ended_s=time.time(),
        stages=item.stages,
    )
