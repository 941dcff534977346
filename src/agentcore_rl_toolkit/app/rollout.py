"""One rollout from its start to its stored record.

Theory of operation. The supervisor is a task on the engine's loop, where rollouts are accepted; agent code never runs there,
so an agent that blocks delays nothing. It waits for whichever comes first, the agent's end or an interruption (SIGTERM,
server shutdown), and then writes exactly one record, create-only. A second task renews the heartbeat object until the record is
stored.

    running --agent returned or raised--> encoding -> storing -> heartbeat deleted
       +------interrupted-------------------^
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract import INFO_FIELD, Cause, Outcome, RolloutConfig, alive_key, parse_record, span_id_of, trace_id_of
from ..errors import AgentCoreRLError, AgentError, InvalidResultError, ObjectExistsError, ObjectTooLargeError
from ..isolation.hints import UNSET, hint
from ..logs import log_context
from ..proof import Proof, check, seal
from ..store import ObjectStore, jitter
from .causes import Blame, blame, elsewhere
from .model import CURRENT, Call
from .record import PolicyReward, RolloutInfo, describe, error_body, success_body
from .runner import AgentRunner
from .settings import AgentSettings
from .texts import READ

logger = logging.getLogger(__name__)

INTERRUPTED = "Interrupted"  # error_type of such a record; its outcome is `lost`, so that clients may try again
_LAST_BEAT_S = 2.0  # how long a heartbeat already under way may delay the end


@dataclass(frozen=True, kw_only=True)
class RolloutFunction:
    """The function that an app registered, and what its decorator says of it.

    ``policy_failures``: exceptions of the agent that are the policy's failures. ``train``: the rule of what trains.
    """

    call: Callable[..., Any]
    name: str
    takes_context: bool
    policy_reward: PolicyReward = 0.0
    policy_failures: tuple[type[BaseException], ...] = ()
    train: str | None = None

    def arguments(self, payload: Any, context: Any) -> tuple[Any, ...]:
        return (payload, context) if self.takes_context else (payload,)


def start_span(name: str, attributes: Mapping[str, Any], context: contextvars.Context) -> Any:
    """Start a span and make it the current one in `context`, so that the agent's own spans hang below it.

    Returns the span, or None when OpenTelemetry is not in use. Attributes that are None are left out.
    """
    trace, otel_context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if trace is None or otel_context is None:
        return None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None  # loaded (the SDK does that), but not set up
    known = {k: v for k, v in attributes.items() if v is not None}
    rollout = _of_the_rollout(trace, str(attributes.get("session.id")))
    above = context.run(trace.get_current_span)
    # Where the request brought no trace of its own, the span hangs in the one that everybody finds by the session's id.
    parent = None if above.get_span_context().is_valid else trace.set_span_in_context(trace.NonRecordingSpan(rollout))
    start = trace.get_tracer("agentcore_rl_toolkit").start_span
    span = context.run(start, name, parent, attributes=known, links=[trace.Link(rollout)])
    context.run(lambda: otel_context.attach(trace.set_span_in_context(span)))
    return span


def _of_the_rollout(trace: Any, session_id: str) -> Any:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    ids = int(trace_id_of(session_id), 16), int(span_id_of(session_id), 16)
    return trace.SpanContext(*ids, is_remote=True, trace_flags=flags)


def end_span(span: Any, outcome: str | None, error: BaseException | None) -> None:
    """End what `start_span` returned; None is fine."""
    if span is None:
        return
    if outcome is not None:
        span.set_attribute("agentcore_rl.outcome", outcome)
    if error is not None:
        trace = sys.modules["opentelemetry.trace"]
        with contextlib.suppress(BaseException):  # the agent's exception may raise another one
            span.set_status(trace.Status(trace.StatusCode.ERROR, describe(error)[0]))
            span.record_exception(error)
    span.end()


def beat_pause_s(period_s: float, took_s: float, fraction: float) -> float:
    """Pause after a heartbeat that took `took_s` to write, or not to: beats begin a period apart, however long they take.

    A store that answers late would otherwise double the time between two signs of life. ``fraction`` in [0, 1) is the
    jitter: up to 30 % early, because a thousand sessions started together must not beat together.
    """
    return max(0.0, period_s * (1.0 - 0.3 * fraction) - took_s)


class Rollout:
    """One run of the agent and its record; without `info` and `store` nothing is stored.

    ``done`` ends when the record is stored or given up.
    """

    def __init__(
        self,
        *,
        function: RolloutFunction,
        args: tuple[Any, ...],
        settings: AgentSettings,
        session_id: str,
        config: RolloutConfig,
        info: RolloutInfo | None = None,
        store: ObjectStore | None = None,
        heartbeat_s: float | None = None,
    ) -> None:
        self.name = function.name
        self._function, self._args, self._settings = function, args, settings
        self._session_id, self._store, self._heartbeat_s = session_id, store, heartbeat_s
        self.config, self.info = config, info
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()  # the agent has ended, or is interrupted
        self._stored = asyncio.Event()
        self._stop_reason = ""
        self._outcome: Outcome | None = None
        self._agent: concurrent.futures.Future[Any] | None = None
        self._first_beat: asyncio.Future[AgentCoreRLError | None] = asyncio.get_running_loop().create_future()
        self._span: Any = None
        self._task: asyncio.Task[None] | None = None
        self.done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.done.set_running_or_notify_cancel()  # waiting for it with a deadline must not cancel it

    @property
    def label(self) -> str:
        """Its name in a log."""
        return self.info.result_key if self.info else self._session_id

    def start(self, runner: AgentRunner) -> asyncio.Task[None]:
        """Start the agent and its supervisor, on the running loop."""
        self._loop = asyncio.get_running_loop()
        config = self.config
        names = {n: str(v) for n, v in (("input_id", config.input_id), ("exp_id", config.exp_id)) if v is not None}
        with log_context(session_id=self._session_id, **names):
            context = contextvars.copy_context()
            context.run(READ.set, self.info.texts if self.info else None)
            call = Call(config=config, ended=lambda: self._agent is not None and self._agent.done())
            context.run(CURRENT.set, call)
            ids = {"session.id": self._session_id, "agentcore_rl.input_id": config.input_id}
            self._span = start_span("rollout", {**ids, "agentcore_rl.exp_id": config.exp_id}, context)
            self._agent = runner.start(self._function.call, self._args, context, f"rollout-{self.name}")
            self._task = self._loop.create_task(self._supervise(self._agent), name=f"supervise-{self.name}")
        return self._task

    async def refusal(self, limit_s: float) -> AgentCoreRLError | None:
        """Why the store will not take this rollout's record, as far as its first sign of life tells within `limit_s`.

        Meanwhile the agent runs. A fault that may pass is tried again for longer than any `limit_s` worth waiting, so an error
        that is there by then is one for good.
        """
        await asyncio.wait({self._first_beat}, timeout=limit_s)
        return self._first_beat.result() if self._first_beat.done() else None

    def give_up(self, runner: AgentRunner, reason: str) -> None:
        """End the agent: nothing it returns could be stored. One that blocks a thread ends with the process."""
        self.interrupt(reason)
        if self._agent is not None:
            runner.cancel(self._agent)

    def interrupt(self, reason: str) -> None:
        """End with an `interrupted` record unless the agent has ended already. Callable from any thread."""
        self._stop_reason = self._stop_reason or reason
        self._wake_up()

    async def _supervise(self, agent: concurrent.futures.Future[Any]) -> None:
        heart: asyncio.Task[None] | None = None
        try:
            if self.info is not None and self._store is not None and self._heartbeat_s is not None:
                heart = asyncio.create_task(self._beat(self.info, self._store, self._heartbeat_s))
            # Not asyncio's copy of the agent's future: that cannot hold a StopIteration, and rebuilds a TimeoutError.
            agent.add_done_callback(lambda _: self._wake_up())
            await self._wake.wait()
            if self.info is not None and self._store is not None:
                await self._finish(self.info, self._store, agent, heart)
            elif agent.done() and agent.exception() is not None:
                logger.error("rollout failed", exc_info=agent.exception())
        except BaseException:  # the last line of defense: a supervisor that dies is a record that is never written
            logger.exception("rollout %s could not be finished", self.label)
        finally:
            if heart is not None:
                heart.cancel()
            end_span(self._span, self._outcome, agent.exception() if agent.done() else None)

    def _wake_up(self) -> None:
        """Let the supervisor go on. Callable from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _beat(self, info: RolloutInfo, store: ObjectStore, period_s: float) -> None:
        """Renew the sign of life until the record is stored, which may itself take a while."""
        stored = asyncio.create_task(self._stored.wait())
        sign = {
            "session_id": info.session_id,
            "attempt": info.config.attempt,
            "started_s": round(info.started_s, 3),
            "period_s": period_s,
        }
        try:
            while not stored.done():
                began_s = time.monotonic()
                body = json.dumps({**sign, "beat_s": round(time.time(), 3)}).encode()
                fault: AgentCoreRLError | None = None
                try:
                    await store.put_async(alive_key(info.result_key), body, durable=False, timeout_s=max(period_s, 5.0))
                except AgentCoreRLError as e:
                    logger.warning("heartbeat not written: %s", e)
                    fault = e
                if not self._first_beat.done():
                    self._first_beat.set_result(fault)
                await asyncio.wait({stored}, timeout=beat_pause_s(period_s, time.monotonic() - began_s, jitter()))
        finally:
            stored.cancel()
            if not self._first_beat.done():
                self._first_beat.set_result(None)

    async def _finish(
        self,
        info: RolloutInfo,
        store: ObjectStore,
        agent: concurrent.futures.Future[Any],
        heart: asyncio.Task[None] | None,
    ) -> None:
        body, outcome = await asyncio.to_thread(self._encode, info, agent)
        self._outcome = outcome
        secret = info.config.proof_key
        if secret is not None:
            body = await asyncio.to_thread(seal, body, info.result_key, secret)
        if not await self._store_record(info, store, body):
            return
        if heart is not None:
            # The object must not reappear after its deletion, so a beat under way comes to its end first.
            self._stored.set()
            await asyncio.wait({heart}, timeout=_LAST_BEAT_S)
            try:
                await store.delete_async(alive_key(info.result_key), timeout_s=10.0)
            except AgentCoreRLError as e:
                logger.warning("heartbeat object left behind: %s", e)

    def _encode(self, info: RolloutInfo, agent: concurrent.futures.Future[Any]) -> tuple[bytes, Outcome]:
        """Return the record and its outcome. It calls methods of the agent's result or exception, which may raise anything."""
        now = time.time()
        if not agent.done():
            stop_reason = f"interrupted: {self._stop_reason}"
            logger.error("%s", stop_reason)
            body = error_body(
                info,
                stop_reason=stop_reason,
                error_type=INTERRUPTED,
                traceback="",
                outcome=Outcome.LOST,
                blame=Blame(cause=Cause.INFRASTRUCTURE),
                finished_s=now,
            )
            return body, Outcome.LOST
        error = agent.exception()
        if error is None:
            try:
                return success_body(info, agent.result(), finished_s=now, max_bytes=self._settings.max_record_bytes)
            except BaseException as e:
                error = e
        returned = agent.exception() is None
        try:
            return self._failure(info, error, returned, now)
        except BaseException:  # name and traceback, past what the agent's class puts in their place
            name = vars(type)["__name__"].__get__(type(error))
            plain = AgentError(name, error_type=name)
            plain.__traceback__ = vars(BaseException)["__traceback__"].__get__(error)
            return self._failure(info, plain, returned, now)

    def _failure(self, info: RolloutInfo, error: BaseException, returned: bool, now: float) -> tuple[bytes, Outcome]:
        """Return the record of an exception: what the agent raised, or why what it ``returned`` cannot be stored."""
        outcome, where = Outcome.AGENT_ERROR, None
        if returned:
            whose = Blame(cause=Cause.AGENT)
            outcome = Outcome.INVALID if isinstance(error, InvalidResultError) else outcome
        else:
            whose = blame(error, self._function.policy_failures)
            where = elsewhere(error, info.config.base_url)
            if where is not None:
                error.add_note(f"The call went to {where}, which is not the model's gateway.")
            if where is not None and whose.cause is Cause.POLICY:  # another model's context or tokens
                whose = Blame(cause=Cause.INFRASTRUCTURE)
            if whose.cause is Cause.INFRASTRUCTURE:  # such as a model call that no engine answered
                outcome = Outcome.LOST
        why = hint(error)
        if why is not None:
            error.add_note(why)
        stop_reason, error_type = describe(error)
        if where is not None:
            stop_reason = f"{where} (not the model's gateway): {stop_reason}"
        if why is not None and why.startswith(UNSET):
            stop_reason = f"{stop_reason}. {why}"
        # the first frame is the runner's, which tells the agent's author nothing
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
        if whose.cause is Cause.POLICY:
            logger.warning("the policy failed (%s): %s: %s", whose.failure, error_type, stop_reason)
        else:
            logger.error("rollout failed: %s: %s", error_type, stop_reason, exc_info=error)
        body = error_body(
            info,
            stop_reason=stop_reason,
            error_type=error_type,
            traceback=text,
            outcome=outcome,
            blame=whose,
            finished_s=now,
            policy_reward=self._function.policy_reward,
        )
        return body, outcome

    async def _store_record(self, info: RolloutInfo, store: ObjectStore, body: bytes) -> bool:
        timeout_s = self._settings.grace_s if self._stop_reason else self._settings.put_timeout_s
        try:
            await store.put_async(info.result_key, body, create_only=True, timeout_s=timeout_s)
        except ObjectExistsError:
            return await self._settle(info, store, body, timeout_s)
        except AgentCoreRLError as e:
            logger.critical("the record of %s is lost: %s", info.result_key, e)
            return False
        logger.info("record stored: %s (%d bytes)", info.result_key, len(body))
        return True

    async def _settle(self, info: RolloutInfo, store: ObjectStore, body: bytes, timeout_s: float) -> bool:
        """The key is taken: this attempt's first record stays; one of an earlier attempt or of another writer is replaced."""
        secret = info.config.proof_key
        try:
            found = await self._record_there(info, store, timeout_s)
            if secret is not None and (not found or check(found, info.result_key, secret) is not Proof.PROVEN):
                logger.critical("security: %s held a record that this session did not write", info.result_key)
                await store.put_async(info.result_key, body, timeout_s=timeout_s)
                logger.info("it is replaced by the session's own: %s", info.result_key)
                return True
            there = parse_record(found)
            block = there.get(INFO_FIELD)
            attempt = block.get("attempt") if isinstance(block, Mapping) else None
            if isinstance(attempt, int) and attempt < info.config.attempt:
                await store.put_async(info.result_key, body, timeout_s=timeout_s)
                return True
        except AgentCoreRLError as e:
            logger.error("%s is taken and could not be settled: %s", info.result_key, e)
        logger.warning("%s holds a record already, which stays", info.result_key)
        return True

    async def _record_there(self, info: RolloutInfo, store: ObjectStore, timeout_s: float) -> bytes:
        """The object at the record's key; empty when it is larger than any record of ours."""
        try:
            return await store.get_async(
                info.result_key, max_bytes=3 * self._settings.max_record_bytes, timeout_s=timeout_s
            )
        except ObjectTooLargeError:
            if info.config.proof_key is None:
                raise
            return b""
