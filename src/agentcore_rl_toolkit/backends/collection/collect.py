"""Collect groups of rollouts, for every trainer.

The gateway makes the sessions of a batch in bulk. Each rollout is one coroutine, `_Collection._rollout`: a slot, the agent,
the tokens, the judgement. Each group is one coroutine, `_Collection._group`: its rollouts, and the judge's scores. The wait
for a slot or for the client's pace ends only if all rollouts hang. Every other stage has a deadline.
The tokens of rollouts that have ended are fetched in bulk (`Sessions.take`), and their sessions are closed, so that no late turn
can arrive. A group that has enough usable rollouts ends the others. Whatever happens, running sessions are stopped at the end,
and the sessions of the batch are deleted.

A failed rollout is data. Only errors of the whole batch raise: bad arguments, and a gateway that cannot make the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...contract import TRAIN_FIELD, Outcome, Stage, new_session_id
from ...errors import (
    AgentCoreRLError,
    ConfigError,
    GatewayError,
    RolloutCancelledError,
    RolloutError,
    RolloutLostError,
    RolloutTimeoutError,
)
from ...logs import WarnsOnceAMinute
from .._portal import run_sync
from ..scorer import scorer_at
from .groups import WHOLE_DISTRIBUTION, CollectConfig, CollectedRollout, Group, GroupRequest, sampling_note
from .judge import end_of_record, ended_by, judge
from .places import Places
from .recording import Recording
from .scored import scored, with_score
from .sessions import GATEWAY_LOOK_S, Sessions
from .teacher import teacher_at

if TYPE_CHECKING:
    from ...client import RolloutClient, RolloutFuture
    from ...gateway import GatewayClient

log = logging.getLogger(__name__)
_sampling = WarnsOnceAMinute(log)
_unsampled = WarnsOnceAMinute(log)

# Added to the limit of a rollout, this is the time in which some rollout must move while others wait for a slot or for the pace.
# It is as long as the client waits out refusals of the runtime.
STANDSTILL_S = 600.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 2.0  # between two checks of a rollout that waits for the pace


class _Rollout:
    """A rollout in progress. Setting ``early_end`` to an error ends it with that error."""

    def __init__(self, request: GroupRequest, index: int) -> None:
        self.request, self.index = request, index
        self.session_id = new_session_id()
        self.address: Any = None
        self.future: RolloutFuture | None = None
        self.started_s: float | None = None
        self.ended = False  # the collection no longer waits for its agent
        self.early_end: asyncio.Future[RolloutError] = asyncio.get_running_loop().create_future()

    @property
    def gateway(self) -> str | None:
        """The URL of its session's gateway, if there are several."""
        return getattr(self.address, "gateway", None)

    @property
    def ids(self) -> dict[str, str]:
        return {"session_id": self.session_id, "input_id": self.request.input_id}

    @property
    def stage(self) -> Stage:
        return self.future.stage if self.future is not None else Stage.QUEUE

    def end_early(self, error: RolloutError) -> None:
        if not self.ended and not self.early_end.done():
            self.early_end.set_result(error)


def collect(requests: Sequence[GroupRequest], **arguments: Any) -> list[Group]:
    """Run `collect_async` for synchronous callers (trainers' rollout hooks), with the same arguments and result."""
    return run_sync(collect_async(requests, **arguments))


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

    `weight_version` is the version training will start from; with `config.max_staleness` set, rollouts whose oldest
    sampled token lies further behind are masked. Without a gateway there are no trajectories, and usable means `ok`
    with a reward. `places` are shared by collections that run at the same time; None allows this one
    `config.max_concurrent`. `recording` writes each rollout to a run's folder.
    `on_rollout`, and `on_queued` with the number of rollouts that have not started, are called on the event loop. Cancelling
    this coroutine stops the rollouts that are running and deletes the batch's sessions.

    Raises: ConfigError on bad arguments; GatewayError when the sessions cannot be made (nothing was started then).
    """
    config = config or CollectConfig()
    doubled = sorted(i for i, n in Counter(r.input_id for r in requests).items() if n > 1)
    if doubled:
        raise ConfigError(f"input ids must differ between groups of one batch; repeated: {', '.join(doubled[:5])}")
    if config.max_staleness is not None and weight_version is None:
        raise ConfigError("max_staleness needs weight_version, the version that training starts from")
    if config.max_staleness is not None and gateway is None:
        raise ConfigError("max_staleness needs a gateway: only captured turns know their weight version")
    if gateway is not None and getattr(client, "retries", False):
        raise ConfigError(
            "a retry would share its session at the gateway with the lost attempt: use a client with retries=0"
        )
    if not requests:
        return []
    watched = recording.watched(client, gateway, config.rollout_timeout_s) if recording is not None else nullcontext()
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

    async def run(self, requests: Sequence[GroupRequest]) -> list[Group]:
        extra = self.config.extra_rollouts
        groups = [[_Rollout(request, i) for i in range(request.n + extra)] for request in requests]
        rollouts = [rollout for group in groups for rollout in group]
        self.queued = len(rollouts)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self._make_sessions(rollouts)
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

    async def _make_sessions(self, rollouts: Sequence[_Rollout]) -> None:
        if self.sessions is None:
            return
        alike: dict[str, list[_Rollout]] = {}
        for rollout in rollouts:
            alike.setdefault(repr(self._sampling_params(rollout.request)), []).append(rollout)
        for part in alike.values():
            params = self._sampling_params(part[0].request)
            addresses = await self._opened(self.sessions, [rollout.session_id for rollout in part], params)
            for rollout in part:
                rollout.address = addresses[rollout.session_id]

    async def _opened(self, sessions: Sessions, session_ids: list[str], params: Mapping[str, Any] | None) -> Any:
        self.session_ids += session_ids  # before the call: a lost reply must not leave sessions at the gateway
        return await sessions.make(session_ids, params)

    def _sampling_params(self, request: GroupRequest) -> Mapping[str, Any] | None:
        neutral = {} if self.config.evaluation else WHOLE_DISTRIBUTION
        given = (neutral, self.config.sampling_params, request.sampling_params)
        return {name: value for params in given for name, value in (params or {}).items()} or None

    async def _watch_gateways(self, sessions: Sessions, rollouts: Sequence[_Rollout]) -> None:
        """End the rollouts whose gateway has been away for too long: their agents may wait for it much longer."""
        while True:
            await asyncio.sleep(GATEWAY_LOOK_S)
            await sessions.look()
            lost = sessions.lost
            running = [r for r in rollouts if r.started_s is not None and not r.ended and not r.early_end.done()]
            gone = [rollout for rollout in running if rollout.gateway in lost]
            for url, count in Counter(rollout.gateway for rollout in gone).items():
                log.error("gateway %s does not answer: %d rollouts that run on it are lost", url, count)
            for rollout in gone:
                why = f"its model gateway {rollout.gateway} does not answer"
                rollout.end_early(RolloutLostError(why, **rollout.ids))

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
                if self.config.judged_by is None:
                    self._report(done, request)
                if done.usable and usable + 1 == request.n:
                    for rollout in rollouts:
                        why = "cancelled: the group had enough usable rollouts"
                        rollout.end_early(RolloutCancelledError(why, **rollout.ids))
        finally:
            await _cancelled(tasks)
        group = Group(input_id=request.input_id, rollouts=[found[i] for i in sorted(found)], request=request)
        if self.config.judged_by is not None:
            group = await scored(group, self.config.judged_by)
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
        stages = dict(rollout.future.stages) if rollout.future is not None else {}
        end = replace(end, elapsed_s=elapsed_s, ended_s=time.time(), stages=stages)
        stops = rollout.early_end.done() or end.outcome is Outcome.TIMEOUT
        (capture, failure), _ = await asyncio.gather(
            self._captured(rollout), self._stop(rollout) if stops else asyncio.sleep(0)
        )
        done = judge(
            end,
            captured=self.sessions is not None and rollout.started_s is not None,
            capture=capture,
            fetch_error=failure,
            config=self.config,
            weight_version=self.weight_version,
            sampling_params=self._sampling_params(rollout.request),
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
        """Return the turns that the gateway recorded, or the error if there are none."""
        if self.sessions is None or rollout.started_s is None:
            return None, None
        return await self.sessions.take(rollout.session_id, rollout.gateway)

    async def _attempt(self, rollout: _Rollout) -> CollectedRollout:
        """Run the agent. Returns how that ended, not yet judged."""
        request = rollout.request
        try:
            await self._take_slot(rollout)
            try:
                if self.sessions is not None and rollout.gateway in self.sessions.away:
                    await self._move(rollout, self.sessions)
                rollout.started_s = time.monotonic()
                self._leaves_queue()
                rollout.future = self.client.submit(
                    dict(request.payload),
                    session_id=rollout.session_id,
                    input_id=request.input_id,
                    rollout_config=self._overrides(rollout),
                )
                record = await self._watched(rollout, asyncio.ensure_future(rollout.future.result_async()))
            finally:
                self.places.release()
        except RolloutError as e:
            named, lost = getattr(e, "stage", None), rollout.early_end.done() and e.outcome == Outcome.LOST
            stage = Stage(named) if named else rollout.stage if lost or e.outcome == Outcome.TIMEOUT else None
            e.session_id, e.input_id = rollout.session_id, request.input_id
            return ended_by(e, index=rollout.index, stage=stage)
        except Exception as e:  # a failed rollout becomes data; the exception object is kept
            trace = None if isinstance(e, (AgentCoreRLError, OSError)) else e
            log.warning("rollout %s failed: %s: %s", rollout.session_id, type(e).__name__, e, exc_info=trace)
            error = RolloutLostError(f"{type(e).__name__}: {e}", **rollout.ids)
            error.__cause__ = e
            end = ended_by(error, index=rollout.index, stage=rollout.stage)
            return replace(end, error=e) if isinstance(e, AgentCoreRLError) else end
        return end_of_record(record, **rollout.ids, index=rollout.index)

    async def _take_slot(self, rollout: _Rollout) -> None:
        """Wait for a free slot. Raises: RolloutError when the rollout is ended, or no more slot becomes free."""
        taking = asyncio.ensure_future(self.places.acquire())
        try:
            await self._watched(rollout, taking)
        except BaseException:
            if taking.done() and not taking.cancelled() and taking.exception() is None:
                self.places.release()
            raise
        self.places.moved()

    async def _watched(self, rollout: _Rollout, task: asyncio.Future[Any]) -> Any:
        """Return the task's result. Raises: its error; RolloutTimeoutError after a stage's limit; an early end's error."""
        look_s, queued = FIRST_LOOK_S, True
        try:
            while True:
                stage, left_s = rollout.stage, self._left_s(rollout)
                if left_s is None:  # waits for a slot or for the pace, as long as any rollout moves
                    standstill_s = self.config.submit_timeout_s + self.config.rollout_timeout_s + STANDSTILL_S
                    if self.places.still_s > standstill_s:
                        raise self._late(rollout, stage, f"there was no progress for {standstill_s:g} s")
                    left_s = look_s
                    look_s = min(2 * look_s, LONGEST_LOOK_S)
                elif left_s <= 0:
                    raise self._late(rollout, stage, "this stage did not end within its limit")
                elif queued:
                    queued = False
                    self.places.moved()
                # The next stage may begin meanwhile, with a shorter limit.
                limit_s = min(left_s, self.config.rollout_timeout_s)
                await asyncio.wait({task, rollout.early_end}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                if rollout.early_end.done():
                    raise rollout.early_end.result()
        finally:
            await _cancelled([task])

    def _left_s(self, rollout: _Rollout) -> float | None:
        """Return the seconds that the rollout's stage has left, or None for a stage without a limit."""
        if rollout.future is None or rollout.stage is Stage.QUEUE:
            return None
        spent_s = rollout.future.stages
        if rollout.stage is Stage.START:
            return self.config.submit_timeout_s - spent_s.get(Stage.START, 0.0)
        return self.config.rollout_timeout_s - spent_s.get(Stage.RUN, 0.0) - spent_s.get(Stage.RESULT, 0.0)

    def _late(self, rollout: _Rollout, stage: Stage, why: str) -> RolloutTimeoutError:
        trouble = getattr(rollout.future, "trouble", None)
        found = f"; its record could not be looked for: {trouble}" if trouble is not None else ""
        return RolloutTimeoutError(f"{why} (stage: {stage.value}){found}", stage=stage.value, **rollout.ids)

    async def _move(self, rollout: _Rollout, sessions: Sessions) -> None:
        """Give a rollout that has not started another session, on a gateway that answers."""
        session_id = new_session_id()
        try:
            addresses = await self._opened(sessions, [session_id], self._sampling_params(rollout.request))
        except GatewayError as e:
            log.warning("rollout %s stays on a gateway that does not answer: %s", rollout.session_id, e)
            return
        rollout.session_id, rollout.address = session_id, addresses[session_id]

    def _overrides(self, rollout: _Rollout) -> dict[str, Any]:
        overrides: dict[str, Any] = dict(rollout.request.overrides)
        params = self._sampling_params(rollout.request)
        if params is not None:
            # The gateway enforces all of them. OpenAI's clients have no parameters top_k and min_p.
            for_agent = {k: v for k, v in params.items() if k not in ("top_k", "min_p") or v != WHOLE_DISTRIBUTION[k]}
            overrides.setdefault("sampling_params", for_agent)
        if self.config.train is not None:
            overrides[TRAIN_FIELD] = self.config.train
        if self.config.model_id is not None:
            overrides.setdefault("model_id", self.config.model_id)
        if rollout.address is not None:
            overrides["base_url"] = rollout.address.base_url
            overrides["api_key"] = rollout.address.api_key
        return overrides

    async def _stop(self, rollout: _Rollout) -> None:
        if rollout.future is None:
            return
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await rollout.future.cancel_async()
        except Exception as e:  # a session that cannot be stopped ends at the runtime's own idle limit
            log.warning("could not stop session %s: %s: %s", rollout.session_id, type(e).__name__, e)

    def _leaves_queue(self) -> None:
        self.queued -= 1
        if self.on_queued is not None:
            self.on_queued(self.queued)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that run, and wait for their end."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # it ended too late; asyncio would log an error that nothing reads
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.gather(*running, return_exceptions=True)
