"""Collect groups of rollouts, for every trainer.

Each rollout is one coroutine, `_Collection._rollout`: a slot, a session at the gateway, the agent, the tokens, the judgement.
Each group is one coroutine, `_Collection._group`: its rollouts, and the judge's scores. The client limits the stages of a
rollout by the deadlines of the configuration.
The tokens of rollouts that have ended are fetched in bulk (`Sessions.take`), and their sessions are closed, so that no late turn
can arrive. A group that has enough usable rollouts ends the others. Whatever happens, running sessions are stopped at the end,
and the sessions of the batch are deleted.

A failed rollout is data. Only errors of the whole batch raise: bad arguments, and a gateway that cannot make the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...client.settings import Deadlines
from ...contract import TRAIN_FIELD, Outcome, Stage, new_session_id
from ...errors import (
    AgentCoreRLError,
    ConfigError,
    GatewayError,
    RolloutCancelledError,
    RolloutError,
    RolloutLostError,
)
from ...logs import WarnsOnceAMinute
from .._portal import CLEAN_UP_S, portal
from ..scorer import scorer_at
from .groups import WHOLE_DISTRIBUTION, CollectedRollout, Group, GroupRequest, sampling_note
from .judge import end_of_record, ended_by, judge
from .recording import Recording
from .scored import scored, with_score
from .sessions import GATEWAY_LOOK_S, Places, Sessions
from .settings import CollectConfig
from .teacher import teacher_at

if TYPE_CHECKING:
    from ...client import RolloutClient, RolloutFuture
    from ...gateway import GatewayClient

log = logging.getLogger(__name__)
_sampling = WarnsOnceAMinute(log)
_unsampled = WarnsOnceAMinute(log)
STOP_S = 15.0


class _Rollout:
    """A rollout in progress. Setting ``early_end`` to an error ends it with that error."""

    def __init__(self, request: GroupRequest, index: int) -> None:
        self.request, self.index = request, index
        self.session_id = new_session_id()
        self.gateway: str | None = None  # the URL of its session's gateway, if there are several
        self.future: RolloutFuture | None = None
        self.started_s: float | None = None
        self.ended = False  # the collection no longer waits for its agent
        self.early_end: asyncio.Future[RolloutError] = asyncio.get_running_loop().create_future()

    @property
    def stage(self) -> Stage:
        return self.future.stage if self.future is not None else Stage.QUEUE

    def end_early(self, error: RolloutError) -> None:
        if not self.ended and not self.early_end.done():
            self.early_end.set_result(error)


def collect(requests: Sequence[GroupRequest], **arguments: Any) -> list[Group]:
    """Run `collect_async` for synchronous callers (trainers' rollout hooks), with the same arguments and result."""
    return portal.call(collect_async(requests, **arguments), clean_up_s=CLEAN_UP_S)


async def collect_async(
    requests: Sequence[GroupRequest],
    *,
    client: RolloutClient,
    gateway: GatewayClient | None,
    config: CollectConfig | None = None,
    weight_version: int | None = None,
    on_rollout: Callable[[CollectedRollout], None] | None = None,
    on_queued: Callable[[int], None] | None = None,
    places: Places | None = None,
    recording: Recording | None = None,
) -> list[Group]:
    """Run every request's rollouts and return one `Group` per request, in request order.

    `weight_version` is the version that training starts from, for the records. Without a gateway there are no trajectories, and
    usable means `ok` with a reward. `places` are shared by collections that run at the same time; None allows this one
    `config.max_concurrent`. `recording` writes each rollout to a run's folder.
    `on_rollout`, and `on_queued` with the number of rollouts that have not started, are called on the event loop. Cancelling
    this coroutine stops the rollouts that are running and deletes the batch's sessions.

    Raises: ConfigError on bad arguments; GatewayError when the gateway opens none of the sessions, or refuses its key.
    """
    config = config or CollectConfig()
    doubled = sorted(i for i, n in Counter(r.input_id for r in requests).items() if n > 1)
    if doubled:
        raise ConfigError(f"input ids must differ between groups of one batch; repeated: {', '.join(doubled[:5])}")
    if gateway is not None and getattr(client, "retries", False):
        raise ConfigError(
            "a retry would share its session at the gateway with the lost attempt: use a client with retries=0"
        )
    if not requests:
        return []
    watched = recording.watched(client, gateway) if recording is not None else nullcontext()
    shared: AbstractAsyncContextManager[Sessions | None] = (
        nullcontext() if gateway is None else Sessions.of(gateway, config)
    )
    with watched:
        async with shared as sessions:
            places = places or Places(config.max_concurrent)
            collection = _Collection(client, sessions, config, weight_version, on_rollout, on_queued, places, recording)
            return await collection.run(requests)


@dataclass(eq=False)
class _Collection:
    """A running batch. ``queued``: the rollouts that have neither started nor ended."""

    client: RolloutClient
    sessions: Sessions | None
    config: CollectConfig
    weight_version: int | None
    on_rollout: Callable[[CollectedRollout], None] | None
    on_queued: Callable[[int], None] | None
    places: Places
    recording: Recording | None
    session_ids: list[str] = field(default_factory=list)
    queued: int = 0
    opened: bool = False  # the gateway has opened a session

    async def run(self, requests: Sequence[GroupRequest]) -> list[Group]:
        extra = self.config.extra_rollouts
        groups = [[_Rollout(request, i) for i in request.places or range(request.n + extra)] for request in requests]
        rollouts = [rollout for group in groups for rollout in group]
        self.queued = len(rollouts)
        tasks: list[asyncio.Task[Any]] = []
        try:
            collecting = [asyncio.create_task(self._group(r, g)) for r, g in zip(requests, groups, strict=True)]
            tasks += collecting
            if self.sessions is not None and self.sessions.urls:
                tasks.append(asyncio.create_task(self._watch_gateways(self.sessions, rollouts)))
            return list(await asyncio.gather(*collecting))
        finally:
            try:
                await _cancelled(tasks)
            finally:  # also when this is cancelled meanwhile
                if self.sessions is not None:
                    self.sessions.end(self.session_ids)

    def _sampling_params(self, rollout: _Rollout) -> dict[str, Any] | None:
        """Return the sampling parameters of a rollout. Each rollout has its own seed, and a second run has the same seeds."""
        neutral, own = {} if self.config.evaluation else WHOLE_DISTRIBUTION, rollout.request.sampling_params or {}
        found: dict[str, Any] = {**neutral, **(self.config.sampling_params or {}), **own}
        if isinstance(seed := found.get("seed"), int) and ("seed" not in own or rollout.index):
            # Equal seeds would give equal or dependent samples.
            found["seed"] = (seed + zlib.crc32(f"{rollout.request.input_id}/{rollout.index}".encode())) % 2**31
        return found or None

    async def _watch_gateways(self, sessions: Sessions, rollouts: Sequence[_Rollout]) -> None:
        """End the rollouts whose gateway has been away for too long: their agents may wait for it much longer."""
        while True:
            await asyncio.sleep(GATEWAY_LOOK_S)
            await sessions.look()
            lost = sessions.lost
            gone = [r for r in rollouts if r.gateway in lost and not r.ended and not r.early_end.done()]
            for url, count in Counter(rollout.gateway for rollout in gone).items():
                log.error("gateway %s does not answer: %d rollouts that run on it are lost", url, count)
            for rollout in gone:
                rollout.end_early(RolloutLostError(f"its model gateway {rollout.gateway} does not answer"))

    # -- one group ----------------------------------------------------------------------------------------------------

    async def _group(self, request: GroupRequest, rollouts: Sequence[_Rollout]) -> Group:
        """Run a group. Enough usable rollouts end the others; later usable ones are surplus."""
        found: dict[int, CollectedRollout] = {}
        tasks = [asyncio.create_task(self._rollout(rollout)) for rollout in rollouts]
        try:
            for ended in asyncio.as_completed(tasks):
                done, usable = await ended, sum(other.usable for other in found.values())
                if done.usable and usable >= request.n:
                    done = replace(done, mask_reason="surplus")
                found[done.index] = done
                if self.config.judging.judge is None:
                    self._report(done, request)
                if done.usable and usable + 1 == request.n:
                    for rollout in rollouts:
                        rollout.end_early(RolloutCancelledError("cancelled: the group had enough usable rollouts"))
        finally:
            await _cancelled(tasks)
        group = Group(input_id=request.input_id, rollouts=[found[i] for i in sorted(found)], request=request)
        if self.config.judging.judge is not None:
            group = await scored(group, self.config.judging)
            for done in group.rollouts:
                self._report(done, request)
        return group

    def _report(self, rollout: CollectedRollout, request: GroupRequest) -> None:
        if self.recording is not None:
            self.recording.add(rollout, request, self.weight_version)
        if self.on_rollout is not None:
            self.on_rollout(rollout)

    # -- one rollout --------------------------------------------------------------------------------------------------

    async def _rollout(self, rollout: _Rollout) -> CollectedRollout:
        """Run a rollout to its end. Return a result whatever fails."""
        try:
            end = await self._attempt(rollout)
        except asyncio.CancelledError:
            await self._stop(rollout)
            raise
        finally:
            rollout.ended = True
            if rollout.started_s is None:
                self._leaves_queue()
        elapsed_s = time.monotonic() - rollout.started_s if rollout.started_s is not None else None
        end = replace(end, elapsed_s=elapsed_s, ended_s=time.time())
        if (future := rollout.future) is not None:  # the last session of a repeated rollout counts
            end = replace(end, session_id=future.session_id, attempt=future.attempt, stages=dict(future.stages))
        stopped = self._stop(rollout) if rollout.early_end.done() else asyncio.sleep(0)
        (capture, failure), _ = await asyncio.gather(self._captured(rollout), stopped)
        done = judge(
            end,
            captured=self.sessions is not None,
            capture=capture,
            fetch_error=failure,
            config=self.config,
            sampling_params=self._sampling_params(rollout),
        )
        if self.config.score is not None:
            scorer = scorer_at(self.config.score, self.config.score_timeout_s)
            done = await with_score(done, rollout.request.payload, scorer)
        training = self.recording is None or self.recording.phase == "train"
        if training and done.trajectory is not None and (report := done.trajectory.report).other_sampling:
            _sampling.warning("%s: %s", rollout.session_id, sampling_note(report.trained_tokens, report.other_sampling))
        if done.trajectory is not None and (count := done.trajectory.report.unsampled_answers):
            _unsampled.warning(
                "%s: its first prompt has %d answers that it never sampled: examples, or the history of an earlier rollout. "
                "Make the agent inside the entrypoint, not in a global variable",
                rollout.session_id,
                count,
            )
        if self.config.teacher_url is not None:
            done = await teacher_at(self.config.teacher_url).taught(done)
        return done

    async def _captured(self, rollout: _Rollout) -> tuple[Any, BaseException | None]:
        if self.sessions is None or rollout.started_s is None:
            return None, None
        return await self.sessions.take(rollout.session_id, rollout.gateway)

    async def _attempt(self, rollout: _Rollout) -> CollectedRollout:
        """Run the agent until it ends, or until the rollout is ended early. Returns how that ended, not yet judged."""
        running = asyncio.ensure_future(self._run_agent(rollout))
        try:
            await asyncio.wait((running, rollout.early_end), return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else _failed(rollout, rollout.early_end.result())
        finally:
            await _cancelled([running])

    async def _run_agent(self, rollout: _Rollout) -> CollectedRollout:
        """Run the agent in a slot. Raises: GatewayError if the gateway has opened no session yet, or refuses its key."""
        request, config = rollout.request, self.config
        limits = {"start_s": config.submit_timeout_s, "run_s": config.rollout_timeout_s}
        async with self.places:
            try:
                overrides = self._overrides(rollout) | await self._opened(rollout)
            except GatewayError as e:
                if not self.opened or e.status in (401, 403):  # none will be opened
                    raise
                return _failed(rollout, RolloutLostError(f"the gateway opened no session: {e}"))
            self.opened = True
            rollout.started_s = time.monotonic()
            self._leaves_queue()
            try:
                rollout.future = self.client.submit(
                    dict(request.payload),
                    session_id=rollout.session_id,
                    input_id=request.input_id,
                    rollout_config=overrides,
                    deadlines=replace(getattr(self.client, "deadlines", Deadlines()), **limits),
                )
                record = await rollout.future.result_async()
            except RolloutError as e:
                return _failed(rollout, e)
            except Exception as e:  # a failed rollout becomes data; the exception object is kept
                if not isinstance(e, AgentCoreRLError):
                    log.warning("rollout %s failed: %s: %s", rollout.session_id, type(e).__name__, e)
                error = RolloutLostError(f"{type(e).__name__}: {e}")
                error.__cause__ = e
                return _failed(rollout, error)
        return end_of_record(record, session_id=rollout.session_id, input_id=request.input_id, index=rollout.index)

    async def _opened(self, rollout: _Rollout) -> dict[str, Any]:
        if self.sessions is None:
            return {}
        self.session_ids.append(rollout.session_id)  # before the call: a lost reply must not leave a session there
        address = await self.sessions.make(rollout.session_id, self._sampling_params(rollout))
        rollout.gateway = getattr(address, "gateway", None)
        return {"base_url": address.base_url, "api_key": address.api_key}

    def _overrides(self, rollout: _Rollout) -> dict[str, Any]:
        overrides: dict[str, Any] = dict(rollout.request.overrides)
        if (params := self._sampling_params(rollout)) is not None:
            # The gateway enforces all of them. OpenAI's clients have no parameters top_k and min_p.
            for_agent = {k: v for k, v in params.items() if k not in ("top_k", "min_p") or v != WHOLE_DISTRIBUTION[k]}
            overrides.setdefault("sampling_params", for_agent)
        if self.config.train is not None:
            overrides[TRAIN_FIELD] = self.config.train
        return overrides

    async def _stop(self, rollout: _Rollout) -> None:
        if rollout.future is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await rollout.future.cancel_async()
        except Exception as e:  # a session that cannot be stopped ends at the runtime's own idle limit
            log.warning("could not stop session %s: %s: %s", rollout.session_id, type(e).__name__, e)

    def _leaves_queue(self) -> None:
        self.queued -= 1
        if self.on_queued is not None:
            self.on_queued(self.queued)


def _failed(rollout: _Rollout, error: RolloutError) -> CollectedRollout:
    named = getattr(error, "stage", None)
    ended_there = error.outcome in (Outcome.LOST, Outcome.TIMEOUT)
    error.session_id, error.input_id = rollout.session_id, rollout.request.input_id
    return ended_by(error, index=rollout.index, stage=Stage(named) if named else rollout.stage if ended_there else None)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that run, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # asyncio logs errors that nothing reads
