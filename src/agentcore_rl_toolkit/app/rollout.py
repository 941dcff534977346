"""A rollout from its start to its stored record.

The supervisor is a task on the server's loop, where no agent code runs, so an agent that blocks delays nothing. It waits for the
agent's end or an interruption (SIGTERM, server shutdown), and then writes exactly one record, create-only. A second task renews
the heartbeat object until the record is stored.

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
from dataclasses import dataclass, field
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

INTERRUPTED = "Interrupted"  # error_type of such a record. Its outcome is `lost`, so that clients may try again
_LAST_BEAT_S = 2.0  # limit for the delay by a running heartbeat at the end


@dataclass(frozen=True, kw_only=True)
class RolloutFunction:
    """The function that an app registered, and the options of its decorator.

    Attributes:
        policy_failures: exceptions of the agent that are failures of the policy.
        train: the rule of what trains.
    """

    call: Callable[..., Any]
    name: str
    takes_context: bool
    policy_reward: PolicyReward = 0.0
    policy_failures: tuple[type[BaseException], ...] = ()
    train: str | None = None

    def arguments(self, payload: Any, context: Any) -> tuple[Any, ...]:
        """Return the arguments of a call."""
        return (payload, context) if self.takes_context else (payload,)


@dataclass(kw_only=True, eq=False)
class Rollout:
    """A run of the agent and its record. Without `store` nothing is stored.

    ``done`` ends when the record is ``stored`` or given up. ``first_beat`` ends with the error of the first heartbeat, or None.
    """

    function: RolloutFunction
    args: tuple[Any, ...]
    settings: AgentSettings
    info: RolloutInfo
    store: ObjectStore | None = None
    heartbeat_s: float | None = None
    stop_reason: str = ""
    stored: bool = False
    agent: concurrent.futures.Future[Any] | None = None
    done: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # waiting for it with a deadline must not cancel it
        self._loop = asyncio.get_running_loop()
        self.first_beat: asyncio.Future[AgentCoreRLError | None] = self._loop.create_future()
        self._wake = asyncio.Event()  # the agent has ended, or is interrupted
        self._stored = asyncio.Event()
        self._outcome: Outcome | None = None

    def start(self, runner: AgentRunner) -> asyncio.Task[None]:
        """Start the agent and its supervisor, on the running loop."""
        config, session_id, name = self.info.config, self.info.session_id, self.function.name
        ids = {n: str(v) for n, v in (("input_id", config.input_id), ("exp_id", config.exp_id)) if v is not None}
        with log_context(session_id=session_id, **ids):
            context = contextvars.copy_context()
            context.run(READ.set, self.info.texts)
            call = Call(config=config, ended=lambda: self.agent is not None and self.agent.done())
            context.run(CURRENT.set, call)
            span = _start_span(session_id, config, context)
            agent = self.agent = runner.start(self.function.call, self.args, context, f"rollout-{name}")
            # Not asyncio's copy of the agent's future: that cannot hold a StopIteration, and rebuilds a TimeoutError.
            agent.add_done_callback(lambda _: self._wake_up())
            return self._loop.create_task(self._supervise(agent, span), name=f"supervise-{name}")

    def interrupt(self, reason: str) -> None:
        """End with an `interrupted` record unless the agent has ended already. Callable from any thread."""
        self.stop_reason = self.stop_reason or reason
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _supervise(self, agent: concurrent.futures.Future[Any], span: Any) -> None:
        heart: asyncio.Task[None] | None = None
        try:
            if self.store is not None and self.heartbeat_s is not None:
                heart = asyncio.create_task(self._beat(self.store, self.heartbeat_s))
            await self._wake.wait()
            if self.store is not None:
                await self._finish(self.store, agent, heart)
            elif agent.done() and agent.exception() is not None:
                logger.error("rollout failed", exc_info=agent.exception())
        except BaseException:  # a supervisor that dies is a record that is never written
            logger.exception("rollout %s could not be finished", self.info.result_key)
        finally:
            if heart is not None:
                heart.cancel()
            _end_span(span, self._outcome, agent.exception() if agent.done() else None)

    async def _beat(self, store: ObjectStore, period_s: float) -> None:
        """Renew the sign of life until the record is stored, which may itself take a while."""
        info = self.info
        sign = {"session_id": info.session_id, "attempt": info.config.attempt, "period_s": period_s}
        sign["started_s"] = round(info.started_s, 3)
        try:
            while not self._stored.is_set():
                began_s = time.monotonic()
                body = json.dumps({**sign, "beat_s": round(time.time(), 3)}).encode()
                fault: AgentCoreRLError | None = None
                try:
                    await store.put_async(alive_key(info.result_key), body, durable=False, timeout_s=max(period_s, 5.0))
                except AgentCoreRLError as e:
                    logger.warning("heartbeat not written: %s", e)
                    fault = e
                if not self.first_beat.done():
                    self.first_beat.set_result(fault)
                # Beats begin a period apart, however long they take to write. Up to 30 % earlier, because a thousand sessions
                # that started together must not beat together.
                pause_s = period_s * (1.0 - 0.3 * jitter()) - (time.monotonic() - began_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stored.wait(), max(0.0, pause_s))
        finally:
            if not self.first_beat.done():
                self.first_beat.set_result(None)

    async def _finish(
        self, store: ObjectStore, agent: concurrent.futures.Future[Any], heart: asyncio.Task[None] | None
    ) -> None:
        info = self.info
        body, self._outcome = await asyncio.to_thread(self._encode, agent)
        if info.config.proof_key is not None:
            body = await asyncio.to_thread(seal, body, info.result_key, info.config.proof_key)
        timeout_s = self.settings.grace_s if self.stop_reason else self.settings.put_timeout_s
        try:
            await store.put_async(info.result_key, body, create_only=True, timeout_s=timeout_s)
            logger.info("record stored: %s (%d bytes)", info.result_key, len(body))
        except ObjectExistsError:
            await self._replace(store, body, timeout_s)
        except AgentCoreRLError as e:
            logger.critical("the record of %s is lost: %s", info.result_key, e)
            return
        self.stored = True
        if heart is not None:
            # The object must not reappear after its deletion, so a running heartbeat ends first.
            self._stored.set()
            await asyncio.wait({heart}, timeout=_LAST_BEAT_S)
            try:
                await store.delete_async(alive_key(info.result_key), timeout_s=10.0)
            except AgentCoreRLError as e:
                logger.warning("the heartbeat object could not be deleted: %s", e)

    def _encode(self, agent: concurrent.futures.Future[Any]) -> tuple[bytes, Outcome]:
        """Return the record and its outcome. It calls methods of the agent's result or exception, which may raise anything."""
        if not agent.done():
            stop_reason = f"interrupted: {self.stop_reason}"
            logger.error("%s", stop_reason)
            about: Any = {"stop_reason": stop_reason, "error_type": INTERRUPTED, "outcome": Outcome.LOST}
            return error_body(self.info, **about, blame=Blame(cause=Cause.INFRASTRUCTURE)), Outcome.LOST
        error = agent.exception()
        returned = error is None
        if error is None:
            try:
                return success_body(self.info, agent.result(), max_bytes=self.settings.max_record_bytes)
            except BaseException as e:
                error = e
        try:
            return self._failure(error, returned)
        except BaseException:  # the class of the agent's exception raises where it is read
            plain = AgentError(type(error).__name__, error_type=type(error).__name__)
            return self._failure(plain.with_traceback(error.__traceback__), returned)

    def _failure(self, error: BaseException, returned: bool) -> tuple[bytes, Outcome]:
        """Return the record of an exception: the agent's, or the reason why its result ``returned`` cannot be stored."""
        outcome, where, whose = Outcome.AGENT_ERROR, None, Blame(cause=Cause.AGENT)
        if returned:
            outcome = Outcome.INVALID if isinstance(error, InvalidResultError) else outcome
        else:
            whose = blame(error, self.function.policy_failures)
            where = elsewhere(error, self.info.config.base_url)
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
        if whose.cause is Cause.POLICY:
            logger.warning("the policy failed (%s): %s: %s", whose.failure, error_type, stop_reason)
        else:
            logger.error("rollout failed: %s: %s", error_type, stop_reason, exc_info=error)
        # The first frame is the runner's.
        frames = (error.__traceback__ and error.__traceback__.tb_next) or error.__traceback__
        body = error_body(
            self.info,
            stop_reason=stop_reason,
            error_type=error_type,
            outcome=outcome,
            blame=whose,
            traceback="".join(traceback.format_exception(type(error), error, frames)),
            policy_reward=self.function.policy_reward,
        )
        return body, outcome

    async def _replace(self, store: ObjectStore, body: bytes, timeout_s: float) -> None:
        """Replace a record of an earlier attempt or of another writer. This attempt's first record stays."""
        key, secret, own_attempt = self.info.result_key, self.info.config.proof_key, self.info.config.attempt
        most = 3 * self.settings.max_record_bytes  # more than any record of ours
        found = b""
        try:
            with contextlib.suppress(ObjectTooLargeError):
                found = await store.get_async(key, max_bytes=most, timeout_s=timeout_s)
            if secret is not None and check(found, key, secret) is not Proof.PROVEN:
                logger.critical("security: %s contained a record that this session did not write; it is replaced", key)
                attempt: object = 0
            else:
                block = parse_record(found).get(INFO_FIELD)
                attempt = block.get("attempt") if isinstance(block, Mapping) else None
            if isinstance(attempt, int) and attempt < own_attempt:
                return await store.put_async(key, body, timeout_s=timeout_s)
        except AgentCoreRLError as e:
            logger.error("%s contains another record, which could not be replaced: %s", key, e)
        logger.warning("%s already contains a record, which is kept", key)


# ---- spans


def _start_span(session_id: str, config: RolloutConfig, context: contextvars.Context) -> Any:
    """Start a span and make it the current one in `context`. Returns None when OpenTelemetry is not in use."""
    trace, otel_context = sys.modules.get("opentelemetry.trace"), sys.modules.get("opentelemetry.context")
    if trace is None or otel_context is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    ids = {"session.id": session_id, "agentcore_rl.input_id": config.input_id, "agentcore_rl.exp_id": config.exp_id}
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    numbers = int(trace_id_of(session_id), 16), int(span_id_of(session_id), 16)
    rollout = trace.SpanContext(*numbers, is_remote=True, trace_flags=flags)
    # Without a trace of the request, the span belongs to the trace that every part finds by the session's id.
    above = context.run(trace.get_current_span)
    parent = None if above.get_span_context().is_valid else trace.set_span_in_context(trace.NonRecordingSpan(rollout))
    known = {name: value for name, value in ids.items() if value is not None}
    start = trace.get_tracer("agentcore_rl_toolkit").start_span
    span = context.run(start, "rollout", parent, attributes=known, links=[trace.Link(rollout)])
    context.run(lambda: otel_context.attach(trace.set_span_in_context(span)))
    return span


def _end_span(span: Any, outcome: str | None, error: BaseException | None) -> None:
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
