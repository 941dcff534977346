"""Collect groups of rollouts: the one engine under every trainer.

How a batch runs. Sessions are made at the gateway in bulk. Each rollout is one task that waits for a free place,
submits, and waits for its record, every step under a deadline; waiting for a place or for the client's pace is limited by
standstill only, because it says nothing about the rollout. When a record is in (or the rollout failed), the
session joins a queue; a single fetcher takes everything that waits there in one bulk call, closing the sessions so
that no late turn can arrive, and judges each rollout: outcome, reward, trajectory, age. The judgement decides early
stopping, so "enough usable rollouts" means really usable ones. With a judge, a group whose rollouts have all ended is scored
(`scored`) before its rollouts are reported. At the end, whatever happened, live rollouts are cancelled and all sessions of the
batch are deleted.

A failed rollout is data. Only what makes the whole batch pointless raises: bad arguments, and a gateway that cannot
even make the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

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
from ..llm_judge import JudgeSettings
from .groups import WHOLE_DISTRIBUTION, CollectConfig, CollectedRollout, Group, GroupRequest, sampling_note
from .judge import end_of_record, ended_by, judge
from .places import Places
from .recording import Recording
from .scored import scored
from .sessions import SESSIONS_PER_CALL, Sessions
from .teacher import teacher_at

if TYPE_CHECKING:
    from ...client import RolloutClient, RolloutFuture
    from ...gateway import GatewayClient

log = logging.getLogger(__name__)
_sampling = WarnsOnceAMinute(log)

T = TypeVar("T")

# How long nothing at all may move while rollouts wait for a place or for the pace, on top of the time one rollout may take: as
# long as the client waits out refusals of the runtime.
STANDSTILL_S = 600.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 2.0  # how often a rollout that waits for the pace is looked at
GATEWAY_LOOK_S = 2.0  # how often several gateways are looked at


class _Late(Exception):  # noqa: N818  (becomes a RolloutTimeoutError of the rollout)
    """A stage took too long."""

    def __init__(self, stage: Stage, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class _Rollout:
    """A rollout in progress. ``cancelled`` or ``lost`` is set before its task is cancelled on purpose."""

    def __init__(self, group: int, index: int) -> None:
        self.group = group
        self.index = index
        self.session_id = new_session_id()
        self.address: Any = None
        self.task: asyncio.Task[None] | None = None
        self.future: RolloutFuture | None = None
        self.started_s: float | None = None
        self.cancelled = False
        self.lost = False  # with its gateway
        self.end: CollectedRollout | None = None

    @property
    def gateway(self) -> str | None:
        """The URL of the gateway that has its session, where there are several."""
        return getattr(self.address, "gateway", None)


def collect(requests: Sequence[GroupRequest], **arguments: Any) -> list[Group]:
    """`collect_async` for synchronous callers (trainers' rollout hooks); same arguments and result."""
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
        raise ConfigError(f"input ids must differ between groups of one batch; given twice: {', '.join(doubled[:5])}")
    if config.max_staleness is not None and weight_version is None:
        raise ConfigError("max_staleness needs weight_version, the version that training starts from")
    if config.max_staleness is not None and gateway is None:
        raise ConfigError("max_staleness needs a gateway: only captured turns know their weight version")
    if not requests:
        return []
    return await _Collection(
        requests, client, gateway, config, weight_version, on_rollout, on_queued, places, recording
    ).run()


class _Collection:
    """A batch under way: sessions, tasks, deadlines, bulk fetches."""

    def __init__(
        self,
        requests: Sequence[GroupRequest],
        client: RolloutClient,
        gateway: GatewayClient | None,
        config: CollectConfig,
        weight_version: int | None,
        on_rollout: Callable[[CollectedRollout], None] | None,
        on_queued: Callable[[int], None] | None,
        places: Places | None,
        recording: Recording | None = None,
    ) -> None:
        self.recording = recording
        self.requests, self.client, self.config = requests, client, config
        self.sessions = Sessions(gateway, config) if gateway is not None else None
        self.weight_version = weight_version
        self.on_rollout, self.on_queued = on_rollout, on_queued
        self.rollouts = [_Rollout(g, i) for g, r in enumerate(requests) for i in range(r.n + config.extra_rollouts)]
        self.judged: dict[str, CollectedRollout] = {}
        self.scored: dict[int, asyncio.Task[Group]] = {}  # by group, where there is a judge
        self.usable_G = [0] * len(requests)
        self.queued = len(self.rollouts)  # neither started nor ended
        self.places = places or Places(config.max_concurrent)
        # Those to be judged, by gateway: one that does not answer holds up its own only. None: wherever else.
        urls = self.sessions.urls if self.sessions is not None else ()
        self.ended: dict[str | None, asyncio.Queue[_Rollout | None]] = {url: asyncio.Queue() for url in (None, *urls)}
        self.standstill_s = config.submit_timeout_s + config.rollout_timeout_s + STANDSTILL_S

    async def run(self) -> list[Group]:
        gateway = self.sessions.gateway if self.sessions is not None else None
        recording, limit_s = self.recording, self.config.rollout_timeout_s
        with recording.watched(self.client, gateway, limit_s) if recording is not None else nullcontext():
            return await self._run()

    async def _run(self) -> list[Group]:
        tasks: set[asyncio.Task[None]] = set()
        watch: set[asyncio.Task[None]] = set()
        try:
            if not self.rollouts:
                return self._groups()
            await self._make_sessions()
            for url in self.ended:
                tasks.add(asyncio.create_task(self._judge_ended(url), name="collect-fetch"))
            if self.sessions is not None and self.sessions.urls:
                watch.add(asyncio.create_task(self._watch_gateways(self.sessions), name="collect-gateways"))
            for rollout in self.rollouts:
                rollout.task = asyncio.create_task(self._roll(rollout), name=f"rollout-{rollout.session_id}")
                tasks.add(rollout.task)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            await asyncio.gather(*self.scored.values())
            return self._groups()
        finally:
            await self._abandon({*tasks, *watch, *self.scored.values()})
            if self.sessions is not None:
                await self.sessions.delete()

    async def _make_sessions(self) -> None:
        if self.sessions is None:
            return
        alike: dict[str, tuple[Mapping[str, Any] | None, list[_Rollout]]] = {}
        for rollout in self.rollouts:
            params = self._sampling_params(self.requests[rollout.group])
            alike.setdefault(repr(params), (params, []))[1].append(rollout)
        for params, rollouts in alike.values():
            addresses = await self.sessions.make([r.session_id for r in rollouts], params)
            for rollout in rollouts:
                rollout.address = addresses[rollout.session_id]

    def _sampling_params(self, request: GroupRequest) -> Mapping[str, Any] | None:
        neutral = {} if self.config.evaluation else WHOLE_DISTRIBUTION
        given = (neutral, self.config.sampling_params, request.sampling_params)
        return {name: value for params in given for name, value in (params or {}).items()} or None

    # -- one rollout --------------------------------------------------------------------------------------------------

    async def _roll(self, rollout: _Rollout) -> None:
        try:
            end = await self._attempt(rollout)
        except asyncio.CancelledError:
            if not rollout.cancelled and not rollout.lost:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            end = self._cancelled(rollout)
        elapsed_s = time.monotonic() - rollout.started_s if rollout.started_s is not None else None
        stages = dict(rollout.future.stages) if rollout.future is not None else {}
        rollout.end = replace(end, elapsed_s=elapsed_s, ended_s=time.time(), stages=stages)
        if rollout.started_s is None:
            self._leaves_queue()
        self.ended.get(rollout.gateway, self.ended[None]).put_nowait(rollout)
        if rollout.lost or end.outcome in (Outcome.CANCELLED, Outcome.TIMEOUT):
            await self._stop(rollout)

    def _cancelled(self, rollout: _Rollout) -> CollectedRollout:
        if rollout.cancelled:
            enough = RolloutCancelledError("cancelled: enough usable rollouts were in", **self._ids(rollout))
            return ended_by(enough, index=rollout.index)
        lost = RolloutLostError(f"its model gateway {rollout.gateway} does not answer", **self._ids(rollout))
        return ended_by(lost, index=rollout.index, stage=_stage_of(rollout))

    def _ids(self, rollout: _Rollout) -> dict[str, str]:
        return {"session_id": rollout.session_id, "input_id": self.requests[rollout.group].input_id}

    async def _attempt(self, rollout: _Rollout) -> CollectedRollout:
        try:
            await self._take_place()
        except _Late as e:
            return self._late(rollout, e)
        try:
            return await self._submit_and_wait(rollout)
        finally:
            self.places.release()

    async def _take_place(self) -> None:
        """Wait for a free place. Raises: _Late when no more place becomes free."""
        taking = asyncio.ensure_future(self.places.acquire())
        try:
            await self._watched(taking, lambda: (Stage.QUEUE, None))
        except BaseException:
            if taking.done() and not taking.cancelled() and taking.exception() is None:
                self.places.release()
            raise
        self.places.moved()

    async def _submit_and_wait(self, rollout: _Rollout) -> CollectedRollout:
        request = self.requests[rollout.group]
        if self.sessions is not None and rollout.gateway in self.sessions.away:
            await self._move(rollout, self.sessions)
        rollout.started_s = time.monotonic()
        self._leaves_queue()
        try:
            rollout.future = self.client.submit(
                dict(request.payload),
                session_id=rollout.session_id,
                input_id=request.input_id,
                rollout_config=self._overrides(rollout),
            )
            future = rollout.future
            asking = asyncio.ensure_future(future.result_async())
            record = await self._watched(asking, lambda: self._left_in_stage(future))
        except RolloutError as e:
            named = getattr(e, "stage", None)
            at = Stage(named) if named else _stage_of(rollout) if e.outcome == Outcome.TIMEOUT else None
            e.session_id, e.input_id = rollout.session_id, request.input_id
            return ended_by(e, index=rollout.index, stage=at)
        except _Late as e:
            return self._late(rollout, e)
        except Exception as e:  # a failed rollout becomes data; the exception object is kept
            trace = None if isinstance(e, (AgentCoreRLError, OSError)) else e
            log.warning("rollout %s failed: %s: %s", rollout.session_id, type(e).__name__, e, exc_info=trace)
            lost = RolloutLostError(f"{type(e).__name__}: {e}", **self._ids(rollout))
            lost.__cause__ = e
            end = ended_by(lost, index=rollout.index, stage=_stage_of(rollout))
            return replace(end, error=e) if isinstance(e, AgentCoreRLError) else end
        return end_of_record(record, **self._ids(rollout), index=rollout.index)

    async def _watched(self, task: asyncio.Future[T], left: Callable[[], tuple[Stage, float | None]]) -> T:
        """The task's result, unless a stage takes too long.

        ``left`` gives the stage and the seconds it still has; None for one that lasts as long as anything moves: waiting
        for a place or for the pace says nothing about the rollout.
        Raises: _Late; what the task raises.
        """
        look_s, queued = FIRST_LOOK_S, True
        try:
            while True:
                stage, left_s = left()
                if left_s is None:
                    if self.places.still_s > self.standstill_s:
                        raise _Late(stage, f"nothing moved for {self.standstill_s:g} s")
                    left_s = look_s
                    look_s = min(2 * look_s, LONGEST_LOOK_S)
                elif left_s <= 0:
                    raise _Late(stage, "no end of this stage within its limit")
                elif queued:
                    queued = False
                    self.places.moved()
                # A stage may begin meanwhile whose limit is shorter than what this one has left.
                await asyncio.wait({task}, timeout=min(left_s, self.config.rollout_timeout_s))
                if task.done():
                    return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _left_in_stage(self, future: RolloutFuture) -> tuple[Stage, float | None]:
        stage, spent_s = future.stage, future.stages
        if stage is Stage.QUEUE:
            return stage, None
        if stage is Stage.START:
            return stage, self.config.submit_timeout_s - spent_s.get(Stage.START, 0.0)
        return stage, self.config.rollout_timeout_s - spent_s.get(Stage.RUN, 0.0) - spent_s.get(Stage.RESULT, 0.0)

    def _overrides(self, rollout: _Rollout) -> dict[str, Any]:
        request = self.requests[rollout.group]
        overrides: dict[str, Any] = dict(request.overrides)
        params = self._sampling_params(request)
        if params is not None:
            # The gateway holds the session to all of them; OpenAI's clients take no top_k and min_p by name.
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

    def _late(self, rollout: _Rollout, late: _Late) -> CollectedRollout:
        trouble = getattr(rollout.future, "trouble", None)
        why = f"; its record could not be looked for: {trouble}" if trouble is not None else ""
        error = RolloutTimeoutError(
            f"{late} (stage: {late.stage.value}){why}",
            stage=late.stage.value,
            **self._ids(rollout),
        )
        return ended_by(error, index=rollout.index, stage=late.stage)

    async def _stop(self, rollout: _Rollout) -> None:
        if rollout.future is None:
            return
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await rollout.future.cancel_async()
        except Exception as e:  # a session that cannot be stopped ends at the runtime's own idle limit
            log.warning("could not stop session %s: %s: %s", rollout.session_id, type(e).__name__, e)

    # -- several gateways ---------------------------------------------------------------------------------------------

    async def _watch_gateways(self, sessions: Sessions) -> None:
        """End the rollouts whose gateway has been away for too long: their agents may wait for it much longer."""
        while True:
            await asyncio.sleep(GATEWAY_LOOK_S)
            await sessions.look()
            lost = sessions.lost
            running = [r for r in self.rollouts if r.task is not None and r.started_s is not None and r.end is None]
            gone = [r for r in running if r.gateway in lost and not (r.lost or r.cancelled)]
            for url, count in Counter(rollout.gateway for rollout in gone).items():
                log.error("gateway %s does not answer: %d rollouts that run on it are lost", url, count)
            for rollout in gone:
                rollout.lost = True
                if rollout.task is not None:
                    rollout.task.cancel()

    async def _move(self, rollout: _Rollout, sessions: Sessions) -> None:
        """Give a rollout that has not started another session, on a gateway that answers."""
        session_id = new_session_id()
        try:
            addresses = await sessions.make([session_id], self._sampling_params(self.requests[rollout.group]))
        except GatewayError as e:
            log.warning("rollout %s stays on a gateway that does not answer: %s", rollout.session_id, e)
            return
        rollout.session_id, rollout.address = session_id, addresses[session_id]

    # -- judging ------------------------------------------------------------------------------------------------------

    async def _judge_ended(self, url: str | None) -> None:
        """Judge what ends on a gateway, until everything is judged: then None comes."""
        ended = self.ended[url]
        while (first := await ended.get()) is not None:
            batch = [first]
            while not ended.empty() and len(batch) < SESSIONS_PER_CALL and (rollout := ended.get_nowait()) is not None:
                batch.append(rollout)
            captures: Mapping[str, Any] = {}
            failures: Mapping[str, BaseException] = {}
            if self.sessions is not None:
                started = [r.session_id for r in batch if r.started_s is not None]
                captures, failures = await self.sessions.fetch(started, url)
            judged = []
            for rollout in batch:
                judged.append(self._judge(rollout, captures.get(rollout.session_id), failures.get(rollout.session_id)))
                await asyncio.sleep(0)  # building trajectories must not hold up records that arrive meanwhile
            if self.config.teacher_url is not None:
                teacher = teacher_at(self.config.teacher_url)
                judged = list(await asyncio.gather(*(teacher.taught(done) for done in judged)))
            for rollout, done in zip(batch, judged, strict=True):
                self._is_judged(rollout, done)

    def _judge(self, rollout: _Rollout, capture: Any, failure: BaseException | None) -> CollectedRollout:
        assert rollout.end is not None
        done = judge(
            rollout.end,
            captured=self.sessions is not None and rollout.started_s is not None,
            capture=capture,
            fetch_error=failure,
            config=self.config,
            weight_version=self.weight_version,
            sampling_params=self._sampling_params(self.requests[rollout.group]),
        )
        training = self.recording is None or self.recording.phase == "train"
        if training and done.trajectory is not None and (report := done.trajectory.report).other_sampling:
            _sampling.warning("%s: %s", rollout.session_id, sampling_note(report.trained_tokens, report.other_sampling))
        return done

    def _is_judged(self, rollout: _Rollout, done: CollectedRollout) -> None:
        request = self.requests[rollout.group]
        if done.usable and self.usable_G[rollout.group] >= request.n:
            done = replace(done, mask_reason="surplus")
        self.judged[rollout.session_id] = done
        if done.usable:
            self.usable_G[rollout.group] += 1
            if self.usable_G[rollout.group] == request.n:
                self._group_is_full(rollout.group)
        if self.config.judged_by is None:
            self._report(done, request)
        elif all(r.session_id in self.judged for r in self.rollouts if r.group == rollout.group):
            self.scored[rollout.group] = asyncio.create_task(self._score(rollout.group, self.config.judged_by))
        if len(self.judged) == len(self.rollouts):
            for ended in self.ended.values():
                ended.put_nowait(None)

    async def _score(self, group: int, judge: JudgeSettings) -> Group:
        found = await scored(self._group(group), judge)
        for rollout in found.rollouts:
            self._report(rollout, found.request)
        return found

    def _report(self, rollout: CollectedRollout, request: GroupRequest) -> None:
        if self.recording is not None:
            self.recording.add(rollout, request, self.weight_version)
        if self.on_rollout is not None:
            self.on_rollout(rollout)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _group_is_full(self, group: int) -> None:
        for rollout in self.rollouts:
            if rollout.group == group and rollout.end is None and rollout.task is not None:
                rollout.cancelled = True
                rollout.task.cancel()

    async def _abandon(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Leave nothing running behind: a no-op after a normal end, otherwise live sessions are stopped."""
        live = [t for t in tasks if not t.done()]
        for rollout in self.rollouts:
            rollout.cancelled = False
        for task in live:
            task.cancel()
        for ended in self.ended.values():
            ended.put_nowait(None)  # Python 3.11's wait_for swallows a cancellation that comes together with its result
        await asyncio.gather(*live, return_exceptions=True)
        unfinished = [r for r in self.rollouts if r.future is not None and r.end is None]
        await asyncio.gather(*(self._stop(r) for r in unfinished))

    def _groups(self) -> list[Group]:
        return [self.scored[g].result() if g in self.scored else self._group(g) for g, _ in enumerate(self.requests)]

    def _group(self, group: int) -> Group:
        request = self.requests[group]
        rollouts = [self.judged[r.session_id] for r in self.rollouts if r.group == group]
        return Group(input_id=request.input_id, rollouts=rollouts, request=request)

    def _leaves_queue(self) -> None:
        self.queued -= 1
        if self.on_queued is not None:
            self.on_queued(self.queued)


def _stage_of(rollout: _Rollout) -> Stage:
    return rollout.future.stage if rollout.future is not None else Stage.QUEUE
