"""Rollouts of a data set for the commands that evaluate: collected, judged and kept as those of a training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backends.collection.collect import collect_async
from ...backends.collection.groups import CollectedRollout, Group, GroupRequest
from ...backends.collection.recording import Recording, input_key
from ...backends.collection.sessions import Places
from ...backends.collection.settings import CollectConfig
from ...client import BatchItem
from ...contract import Cause, Outcome
from ...errors import ConfigError
from ...runs import Query, RunReader
from ...runs.folder import ROLLOUTS

if TYPE_CHECKING:
    from ...client import RolloutClient
    from ...gateway import GatewayClient


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The parts that rollouts of a data set need. ``score`` is the scorer of `agentcore-rl up`.

    ``gateway`` is None for an agent with another model than the stack's.
    """

    client: RolloutClient
    gateway: GatewayClient | None
    recording: Recording
    score: str | None


def collect(
    requests: Iterable[GroupRequest],
    add: Callable[[int, Group], object],
    *,
    client: RolloutClient,
    gateway: GatewayClient | None,
    config: CollectConfig,
    recording: Recording | None = None,
    **shared: Any,
) -> None:
    """Collect groups, and call ``add`` with the place and the group of each request. Blocks.

    The next request is taken when a slot is free. ``shared`` are further arguments of `collect_async`, whose errors are raised.
    """
    shared |= {"client": client, "gateway": gateway, "config": config, "recording": recording}

    async def every() -> None:
        places, left = Places(config.max_concurrent), enumerate(requests)

        async def work() -> None:
            for place, request in left:
                [group] = await collect_async([request], places=places, **shared)
                add(place, group)

        workers = [asyncio.create_task(work()) for _ in range(config.max_concurrent)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    with nullcontext() if recording is None else recording.watched(client, gateway):
        asyncio.run(every())


def evaluation_config(**settings: Any) -> CollectConfig:
    """Return the settings of a collection in which an agent may leave out its reward, or call another model."""
    return CollectConfig(evaluation=True, require_reward=False, require_calls=False, **settings)


def item_of(rollout: CollectedRollout, index: int, config: CollectConfig) -> BatchItem:
    """Return a rollout as an item of results. A scorer's or judge's reward replaces the agent's in its record."""
    record = rollout.record
    if rollout.outcome is Outcome.OK and record is not None and (config.score or config.judge):
        detail = rollout.reward_detail
        record = _rewarded(record, rollout.reward, {} if detail is None else detail.metrics)
        if rollout.judge_score is not None:
            record["judge"] = rollout.judge_score.reason
    return BatchItem(
        success=rollout.outcome is Outcome.OK,
        result=None if record is None else dict(record),
        error=rollout.reason,
        index=index,
        elapsed=rollout.elapsed_s,
        exception=rollout.error,
        outcome=rollout.outcome,
        input_id=rollout.input_id,
        session_id=rollout.session_id,
        attempt=rollout.attempt or 1,
        stages=rollout.stages,
        traceback=rollout.traceback,
        cause=rollout.cause,
        failure=rollout.failure,
    )


def items_before(
    folder: Path, config: CollectConfig, payloads: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[BatchItem]]:
    """Return the items of a resumed run by input. Rollouts whose scorer failed are left out: they run again.

    Raises: ConfigError if the run had another payload for an input.
    """
    found: dict[str, list[BatchItem]] = {}
    if not (folder / ROLLOUTS).exists():
        return found
    with RunReader(folder) as run:
        for number in run.ids(Query()):
            row = run.rollout(number) or {}
            payload = payloads.get(row["grp"])
            if payload is not None and input_key(payload) != row["input_key"]:
                raise ConfigError(
                    f"the run began with another row for input {row['grp']!r}: its payload differs. Repeat the data, or choose "
                    "another --out"
                )
            if payload is None or row["cause"] == Cause.SCORER:
                continue
            detail, outcome = row["detail"] or {}, Outcome(row["outcome"])
            record = detail.get("record")
            if config.score and record is not None and outcome is Outcome.OK:
                record = _rewarded(record, row["reward"], detail.get("metrics") or {})
            item = BatchItem(
                success=outcome is Outcome.OK,
                result=record,
                error=row["error"],
                index=row["place"],
                elapsed=row["elapsed_s"],
                outcome=outcome,
                input_id=row["grp"],
                session_id=row["session_id"],
                attempt=row["attempt"] or 1,
                stages=detail.get("stages") or {},
                traceback=detail.get("traceback"),
                cause=row["cause"] and Cause(row["cause"]),
                failure=row["failure"],
            )
            found.setdefault(row["grp"], []).append(item)
    return found


def _rewarded(record: Mapping[str, Any], reward: float | None, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return a record with another reward, or without one."""
    rest = {name: value for name, value in record.items() if name not in ("rewards", "reward", "turn_rewards")}
    return rest if reward is None else {**rest, "rewards": {"reward": reward, **metrics}}
