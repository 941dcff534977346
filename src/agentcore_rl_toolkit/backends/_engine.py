"""The machinery behind `collect`: sessions, tasks, deadlines, bulk fetches. See collect.py for how a batch runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..contract import Outcome, Stage, new_session_id
from ..errors import (
    AgentCoreRLError,
    GatewayError,
    RolloutCancelledError,
    RolloutError,
    RolloutLostError,
    RolloutTimeoutError,
)
from ._judge import End, end_of_record, judge
from .groups import CollectConfig, CollectedRollout, Group, GroupRequest

log = logging.getLogger(__name__)

SESSIONS_PER_CALL = 256  # keeps a bulk reply of 20-turn sessions at tens of MB
LATE_GRACE_S = 5.0  # on top of the client's own deadline, before we stop believing that it keeps it


class Future(Protocol):
    """The part of a rollout future that is used here."""

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]: ...
    async def cancel_async(self) -> bool: ...


class Client(Protocol):
    """The part of `RolloutClient` that is used here."""

    async def invoke_async(
        self, payload: dict[str, Any], session_id: str | None = None, input_id: str | None = None, **overrides: Any
    ) -> Any: ...


class Gateway(Protocol):
    """The part of `GatewayClient` that is used here."""

    async def create_sessions_async(
        self,
        session_ids: Sequence[str],
        *,
        sampling_params: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        max_turns: int | None = None,
    ) -> Any: ...
    async def fetch_async(self, session_ids: Sequence[str], *, close: bool = True) -> Any: ...
    async def delete_async(self, session_ids: Sequence[str]) -> int: ...


@dataclass(frozen=True, kw_only=True)
class CollectProgress:
    """A moment of a running collection: how many rollouts are where, and what is in so far."""

    total: int
    queued: int
    running: int
    done: int
    usable: int
    outcomes: Mapping[str, int]
    reward_mean: float | None
    elapsed_s: float


class Rollout:
    """A rollout in progress. ``cancelled`` is set before its task is cancelled on purpose."""

    def __init__(self, group: int, index: int) -> None:
        self.group = group
        self.index = index
        self.session_id = new_session_id()
        self.address: Any = None
        self.task: asyncio.Task[None] | None = None
        self.future: Future | None = None
        self.started_s: float | None = None
        self.cancelled = False
        self.end: End | None = None


class Engine:
    def __init__(
        self,
        requests: Sequence[GroupRequest],
        client: Client,
        gateway: Gateway | None,
        config: CollectConfig,
        weight_version: int | None,
        on_rollout: Callable[[CollectedRollout], None] | None,
        on_progress: Callable[[CollectProgress], None] | None,
    ) -> None:
        self.requests, self.client, self.gateway, self.config = requests, client, gateway, config
        self.weight_version = weight_version
        self.on_rollout, self.on_progress = on_rollout, on_progress
        self.rollouts = [Rollout(g, i) for g, r in enumerate(requests) for i in range(r.n + config.extra_rollouts)]
        self.judged: dict[str, CollectedRollout] = {}
        self.usable_G = [0] * len(requests)
        self.running = 0
        self.reward_sum = 0.0
        self.outcomes: Counter[str] = Counter()
        self.places = asyncio.Semaphore(config.max_concurrent)
        self.ended: asyncio.Queue[Rollout] = asyncio.Queue()
        self.began_s = time.monotonic()
        self.deadline_s = self.began_s + config.batch_limit_s(len(self.rollouts))

    async def run(self) -> list[Group]:
        made: list[str] = []
        tasks: set[asyncio.Task[None]] = set()
        try:
            await self._make_sessions(made)
            fetcher = asyncio.create_task(self._judge_ended(), name="collect-fetch")
            tasks.add(fetcher)
            for rollout in self.rollouts:
                rollout.task = asyncio.create_task(self._roll(rollout), name=f"rollout-{rollout.session_id}")
                tasks.add(rollout.task)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            return self._groups()
        finally:
            await self._abandon(tasks)
            await self._delete_sessions(made)

    # -- gateway sessions ---------------------------------------------------------------------------------------------

    async def _make_sessions(self, made: list[str]) -> None:
        if self.gateway is None:
            return
        alike: dict[str, tuple[Mapping[str, Any] | None, list[Rollout]]] = {}
        for rollout in self.rollouts:
            params = self._sampling_params(self.requests[rollout.group])
            alike.setdefault(repr(params), (params, []))[1].append(rollout)
        for params, rollouts in alike.values():
            for start in range(0, len(rollouts), SESSIONS_PER_CALL):
                part = rollouts[start : start + SESSIONS_PER_CALL]
                ids = [r.session_id for r in part]
                made.extend(ids)  # before the call: a reply that gets lost must not leave sessions behind
                handles = await self._ask_gateway(
                    self.gateway.create_sessions_async(
                        ids, sampling_params=params, model_id=self.config.model_id, max_turns=self.config.max_turns
                    ),
                    "make sessions",
                )
                by_id = {h.session_id: h for h in handles}
                for rollout in part:
                    if rollout.session_id not in by_id:
                        raise GatewayError("the gateway did not make this session", session_id=rollout.session_id)
                    rollout.address = by_id[rollout.session_id]

    async def _delete_sessions(self, made: list[str]) -> None:
        if self.gateway is None:
            return
        for start in range(0, len(made), SESSIONS_PER_CALL):
            part = made[start : start + SESSIONS_PER_CALL]
            try:
                await self._ask_gateway(self.gateway.delete_async(part), "delete sessions")
            except Exception as e:  # the data is already here; the gateway's retention limit removes them later
                log.warning("could not delete %d gateway sessions: %s", len(made) - start, e)
                return

    async def _ask_gateway(self, call: Awaitable[Any], what: str) -> Any:
        limit_s = self.config.gateway_timeout_s
        try:
            return await asyncio.wait_for(call, limit_s)
        except TimeoutError as e:
            raise GatewayError(f"the gateway did not {what} within {limit_s:g} s; is it running?") from e

    def _sampling_params(self, request: GroupRequest) -> Mapping[str, Any] | None:
        if request.sampling_params is None:
            return self.config.sampling_params
        return {**(self.config.sampling_params or {}), **request.sampling_params}

    # -- one rollout --------------------------------------------------------------------------------------------------

    async def _roll(self, rollout: Rollout) -> None:
        try:
            end = await self._attempt(rollout)
        except asyncio.CancelledError:
            if not rollout.cancelled:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            error = RolloutCancelledError("cancelled: enough usable rollouts were in", session_id=rollout.session_id)
            end = End(outcome=Outcome.CANCELLED, error=error)
        elapsed_s = time.monotonic() - rollout.started_s if rollout.started_s is not None else None
        rollout.end = replace(end, elapsed_s=elapsed_s)
        self.running -= rollout.started_s is not None
        self.ended.put_nowait(rollout)
        if end.outcome in (Outcome.CANCELLED, Outcome.TIMEOUT):
            await self._stop(rollout)

    async def _attempt(self, rollout: Rollout) -> End:
        try:
            async with asyncio.timeout(self._left_s()):
                await self.places.acquire()
        except TimeoutError:
            return self._late(rollout, Stage.QUEUE, "waited for a free place until the batch's deadline")
        try:
            return await self._submit_and_wait(rollout)
        finally:
            self.places.release()

    async def _submit_and_wait(self, rollout: Rollout) -> End:
        request = self.requests[rollout.group]
        rollout.started_s = time.monotonic()
        self.running += 1
        self._report()
        stage = Stage.START
        limit_s = min(self.config.submit_timeout_s, self._left_s())
        try:
            async with asyncio.timeout(limit_s):
                rollout.future = await self.client.invoke_async(
                    dict(request.payload),
                    session_id=rollout.session_id,
                    input_id=request.input_id,
                    **self._overrides(rollout),
                )
            stage = Stage.RUN
            limit_s = min(self.config.rollout_timeout_s, self._left_s())
            async with asyncio.timeout(limit_s + LATE_GRACE_S):
                record = await rollout.future.result_async(timeout=limit_s)
        except RolloutError as e:
            named = getattr(e, "stage", None)
            at = Stage(named) if named else stage if e.outcome == Outcome.TIMEOUT else None
            return End(outcome=Outcome(e.outcome), error=e, record=getattr(e, "record", None), stage=at)
        except TimeoutError:
            return self._late(rollout, stage, f"no end of this stage after {limit_s:g} s")
        except Exception as e:  # a failed rollout becomes data; the exception object is kept
            log.warning("rollout %s failed: %s: %s", rollout.session_id, type(e).__name__, e)
            if isinstance(e, AgentCoreRLError):
                return End(outcome=Outcome.LOST, error=e, stage=stage)
            lost = RolloutLostError(
                f"{type(e).__name__}: {e}", session_id=rollout.session_id, input_id=request.input_id
            )
            lost.__cause__ = e
            return End(outcome=Outcome.LOST, error=lost, stage=stage)
        return end_of_record(record, session_id=rollout.session_id, input_id=request.input_id)

    def _overrides(self, rollout: Rollout) -> dict[str, Any]:
        request = self.requests[rollout.group]
        overrides: dict[str, Any] = dict(request.overrides)
        params = self._sampling_params(request)
        if params is not None:
            overrides.setdefault("sampling_params", dict(params))
        if self.config.model_id is not None:
            overrides.setdefault("model_id", self.config.model_id)
        if rollout.address is not None:
            overrides["base_url"] = rollout.address.base_url
            overrides["api_key"] = rollout.address.api_key
        return overrides

    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def _late(self, rollout: Rollout, stage: Stage, message: str) -> End:
        error = RolloutTimeoutError(
            message,
            stage=stage.value,
            session_id=rollout.session_id,
            input_id=self.requests[rollout.group].input_id,
        )
        return End(outcome=Outcome.TIMEOUT, error=error, stage=stage)

    async def _stop(self, rollout: Rollout) -> None:
        if rollout.future is None:
            return
        try:
            await asyncio.wait_for(rollout.future.cancel_async(), self.config.stop_timeout_s)
        except Exception as e:  # a session that cannot be stopped ends at the runtime's own idle limit
            log.warning("could not stop session %s: %s: %s", rollout.session_id, type(e).__name__, e)

    # -- judging ------------------------------------------------------------------------------------------------------

    async def _judge_ended(self) -> None:
        while len(self.judged) < len(self.rollouts):
            batch = [await self.ended.get()]
            while not self.ended.empty() and len(batch) < SESSIONS_PER_CALL:
                batch.append(self.ended.get_nowait())
            captures, failure = await self._fetch([r.session_id for r in batch if r.started_s is not None])
            for rollout in batch:
                self._judge(rollout, captures.get(rollout.session_id), failure)
                await asyncio.sleep(0)  # building trajectories must not hold up records that arrive meanwhile

    async def _fetch(self, session_ids: list[str]) -> tuple[Mapping[str, Any], BaseException | None]:
        if self.gateway is None or not session_ids:
            return {}, None
        failure: BaseException | None = None
        for attempt in (1, 2):
            try:
                return await self._ask_gateway(
                    self.gateway.fetch_async(session_ids, close=True), "hand out trajectories"
                ), None
            except Exception as e:
                failure = e
                log.warning("fetching %d trajectories failed (try %d of 2): %s", len(session_ids), attempt, e)
        return {}, failure

    def _judge(self, rollout: Rollout, capture: Any, failure: BaseException | None) -> None:
        assert rollout.end is not None
        request = self.requests[rollout.group]
        done = judge(
            rollout.end,
            session_id=rollout.session_id,
            input_id=request.input_id,
            index=rollout.index,
            captured=self.gateway is not None and rollout.started_s is not None,
            capture=capture,
            fetch_error=failure,
            config=self.config,
            weight_version=self.weight_version,
        )
        if done.usable and self.usable_G[rollout.group] >= request.n and not self.config.keep_surplus:
            done = replace(done, mask_reason="surplus")
        self.judged[rollout.session_id] = done
        self.outcomes[done.outcome.value] += 1
        if done.usable:
            self.usable_G[rollout.group] += 1
            self.reward_sum += done.reward or 0.0
            if self.usable_G[rollout.group] == request.n:
                self._group_is_full(rollout.group)
        if self.on_rollout is not None:
            self.on_rollout(done)
        self._report()

    # -- ending -------------------------------------------------------------------------------------------------------

    def _group_is_full(self, group: int) -> None:
        wanted = self.config.enough_groups
        full = sum(n >= r.n for n, r in zip(self.usable_G, self.requests, strict=True))
        everything = wanted is not None and full >= wanted
        for rollout in self.rollouts:
            if (everything or rollout.group == group) and rollout.end is None and rollout.task is not None:
                rollout.cancelled = True
                rollout.task.cancel()

    async def _abandon(self, tasks: set[asyncio.Task[None]]) -> None:
        """Leave nothing running behind: a no-op after a normal end, otherwise live sessions are stopped."""
        live = [t for t in tasks if not t.done()]
        for rollout in self.rollouts:
            rollout.cancelled = False
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)
        unfinished = [r for r in self.rollouts if r.future is not None and r.end is None]
        await asyncio.gather(*(self._stop(r) for r in unfinished))

    def _groups(self) -> list[Group]:
        groups = [Group(input_id=r.input_id, rollouts=[], request=r) for r in self.requests]
        for rollout in self.rollouts:
            groups[rollout.group].rollouts.append(self.judged[rollout.session_id])
        return groups

    def _report(self) -> None:
        if self.on_progress is None:
            return
        usable = sum(self.usable_G)
        ended = sum(r.end is not None for r in self.rollouts)
        self.on_progress(
            CollectProgress(
                total=len(self.rollouts),
                queued=len(self.rollouts) - ended - self.running,
                running=self.running,
                done=len(self.judged),
                usable=usable,
                outcomes=dict(self.outcomes),
                reward_mean=self.reward_sum / usable if usable else None,
                elapsed_s=time.monotonic() - self.began_s,
            )
        )
