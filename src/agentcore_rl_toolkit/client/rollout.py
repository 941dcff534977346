"""The life of a rollout, from its queue to its verdict, and the state that the rollouts of a client share.

A rollout is one task on its client's loop. Each stage has a deadline:

    queue   waits for a connection and for the pace of the agent, and waits out refusals for up to `throttle_s`
    start   from the invoke on the wire until the runtime accepted it
    run     until the record is in the store
    result  until the record is read
    stop    in the background, after the future is resolved

Before a deadline ends a rollout, the client checks once more. A reply or a record that came while this process was stopped is in
time.

An invoke is sent again at once only when nothing runs because of it (`Fate.REFUSED`, `Fate.TRANSIENT`). If its fate is uncertain,
the rollout looks for the session's heartbeat or record for `confirm_s`. If neither appears after a 500 or 503, the invoke is sent
again if a second delivery does no harm (`Dispatcher.runs_once`). Otherwise the session is given up. A retry has a new session id.

Every rollout ends in exactly one `Verdict`, and every session that may exist is stopped.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .._portal import Portal
from ..aws_errors import Fate
from ..contract import (
    ERRORS,
    REFERENCE_FIELD,
    ROLLOUT_FIELD,
    RUNS_ONCE_FIELD,
    Outcome,
    Stage,
    alive_key,
    check_session_id,
    new_session_id,
    result_key,
)
from ..errors import (
    AgentCoreRLError,
    AgentError,
    ConfigError,
    InvalidResultError,
    RolloutCancelledError,
    RolloutLostError,
    RolloutThrottledError,
    text_of,
)
from ..proof import PROOF_KEY_FIELD, REPLY_FIELD, SCHEME, Proof, ProofKey
from ..store import ObjectStore, backoff_s, open_store
from ..store.base import check_key
from ..store.remote import find_region
from .future import RolloutFuture
from .ledger import NO_LEDGER, Attempt, FileLedger, fingerprint
from .pacing import Pacer, take_turn
from .records import READS_AT_ONCE, Verdict, read_record
from .settings import RETRYABLE, Deadlines, Prepare, TurnsOf, WatchSettings
from .stops import Stops
from .transport import CONNECT_TIMEOUT_S, CallError, Transport, in_thread, parse_reply, within
from .watcher import Waiter, Watcher

logger = logging.getLogger("agentcore_rl_toolkit.client")

# (event, fields). Events: intent, accepted, refused, server_error, retried, finished, stopped
Subscriber = Callable[[str, Mapping[str, Any]], None]
COUNTS = {"intent": "submitted", "refused": "refused", "server_error": "server_errors", "retried": "retried"}
LAST_TURNS_S = 30.0  # model calls in this time before the deadline of the run show that the agent is in a loop
COUNT_S = 5.0  # limit of one count of model calls
CONFIRM_ERROR_S = 5.0  # looking for a session after a 500 or 503


@dataclass(kw_only=True, eq=False, repr=False)
class Rollout(RolloutFuture):
    """A rollout with all its attempts. It is also the future that the caller gets.

    Attributes:
        known: the ledger's entry of a session that an earlier process started. The rollout waits for this session or reads its
            record.
        reply: the agent's reply to the invoke.
        call: the invoke, on the wire or finished. None while no session can exist.
        errors: the errors of this attempt's invokes.
        stop: the stop of this attempt's session.
    """

    shared: Dispatcher
    payload: Mapping[str, Any]
    config: Mapping[str, Any]
    retries: int
    prepare: Prepare | None = None
    index: int | None = None
    ledger: FileLedger = NO_LEDGER
    known: Attempt | None = None

    reply: dict[str, Any] | None = None
    call: asyncio.Future[bytes] | None = None
    errors: list[CallError] = field(default_factory=list)
    stop: asyncio.Task[bool] | None = None

    # ---- the whole rollout

    def start(self, on_end: Callable[[], object]) -> None:
        """Begin, on the loop."""

        def ended(task: asyncio.Task[Verdict]) -> None:
            on_end()
            if self.stop is None and self.known is not None and self.known.outcome is None:
                self.stop = self.shared.stops.start(self.session_id, self.ledger)  # cancelled before its first step
            error = RolloutCancelledError("the client was closed") if task.cancelled() else task.exception()
            verdict = self._claim(task.result() if error is None else Verdict(error=error))  # the first verdict wins
            try:
                self.shared.ended(self, verdict, "finished")
            finally:
                self.payload, self.config, self.errors = {}, {}, []  # the caller may keep the future for long
                self._accept(False)
                self._done.set_result(verdict)

        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(ended)
        if self.shared.closing or self.done():
            self._task.cancel()

    async def _run(self) -> Verdict:
        retries_left = self.retries
        while True:
            known = self.known
            over = known if known is not None and known.outcome is not None else None
            try:
                verdict = await (self._attempt(known) if over is None else self._read_known(over))
            except Exception as e:
                if not isinstance(e, AgentCoreRLError):  # `prepare` is user code
                    logger.error("rollout failed inside the client", exc_info=e, extra={"session_id": self.session_id})
                verdict = Verdict(error=e)
            # If an earlier process died before it sent the invoke, the attempt does not count.
            unsent = known is not None and not known.accepted_s and verdict.outcome is Outcome.LOST
            retries_left -= not unsent
            if over is not None or retries_left < 0 or verdict.outcome not in RETRYABLE:
                return verdict
            self.shared.ended(self, verdict, "retried")
            if unsent and self.stop is not None:
                await asyncio.wait([self.stop])
            self.known, self.session_id, self.attempt = None, new_session_id(), self.attempt + 1
            self.call, self.stop, self.reply, self.errors = None, None, None, []
            self.stage, self._entered_s, self._spent_s = Stage.QUEUE, time.monotonic(), {}

    async def _attempt(self, known: Attempt | None) -> Verdict:
        """Run one session, from the queue to its verdict."""
        body = b""
        try:
            if known is None:
                body = self._encode(await self._prepared_config())
                self._write_intent()
            else:
                self.s3_bucket, self.result_key, self.sent_s = known.bucket, known.key, time.monotonic()
                self._accept()
            while True:
                if known is None:
                    await self._send(body)
                verdict = await self._follow()
                if verdict is not None:
                    return verdict
        finally:
            if self.call is not None or known is not None:
                self.stop = self.shared.stops.start(self.session_id, self.ledger, self.call)
            else:  # a session cannot exist
                self.ledger.note(self.session_id, event="stopped")

    # ---- before the invoke

    async def _prepared_config(self) -> dict[str, Any]:
        config = dict(self.config)
        if self.prepare is not None:
            limit_s = self.deadlines.start_s
            try:
                async with asyncio.timeout(limit_s):
                    extra = self.prepare(self.session_id, self.attempt)
                    config.update(await extra if inspect.isawaitable(extra) else extra)
            except TimeoutError as e:
                raise RolloutLostError(f"prepare timed out (limit: start_s={limit_s:g})") from e
        config.setdefault("attempt", self.attempt)
        config.setdefault("heartbeat_s", self.shared.watch.heartbeat_s)
        config[PROOF_KEY_FIELD] = self.shared.proof_key(self.ledger).session_secret(self.session_id)
        return config

    def _encode(self, config: dict[str, Any]) -> bytes:
        """Encode the invoke's body, and set the place of the record."""
        bucket = str(config.get("s3_bucket"))
        if "://" not in bucket or bucket.startswith("s3://"):
            config.setdefault("s3_region", self.shared.s3_region)
        try:
            row = {name: value for name, value in self.payload.items() if name != REFERENCE_FIELD}
            body = json.dumps({**row, ROLLOUT_FIELD: config}).encode()
            self.result_key = result_key(config["exp_id"], config["input_id"], self.session_id)
            self.s3_bucket = str(config["s3_bucket"])
            self.shared.store(self.s3_bucket).check_writable(alive_key(self.result_key))
        except (TypeError, ValueError, RecursionError) as e:
            raise ConfigError(f"the payload cannot be sent: {e}") from e
        return body

    def _write_intent(self) -> None:
        about = {"index": self.index, "key": self.result_key, "bucket": self.s3_bucket}
        if self.ledger is not NO_LEDGER:
            ids = {"input_id": self.input_id, "session_id": self.session_id, "attempt": self.attempt}
            digests = {"payload": fingerprint(self.payload), "proof_key": self.shared.proof_key(self.ledger).id}
            self.ledger.append({"event": "intent", "t": time.time(), **ids, **about, **digests})
        self.shared.tell("intent", self, **about)

    # ---- queue and start

    async def _send(self, body: bytes) -> None:
        """Send the invoke until the runtime has accepted it, or until its session may run without a reply."""
        deadlines = self.deadlines
        patience_s = min(deadlines.start_s, math.inf if self.timeout_s is None else self.timeout_s)
        first_s = refused_s = down_s = pause_s = 0.0
        while True:
            self._enter(Stage.QUEUE)
            await asyncio.sleep(pause_s)
            await self.shared.wait_for_turn()
            self._enter(Stage.START)
            self.sent_s = time.monotonic()
            first_s = first_s or self.sent_s
            self.call = self.shared.invoke(self.session_id, body)
            try:
                return self._handle_reply(parse_reply(await within(self.call, patience_s), self.session_id))
            except CallError as e:
                error = e
            except TimeoutError as e:
                if patience_s == self.timeout_s:
                    raise self._timed_out() from e
                error = CallError(f"no reply within {patience_s:g} s")
            except ConfigError as e:
                if e.code != "RuntimeClientError" and not self._may_run():
                    self.call = None  # refused before a session existed
                raise
            self.errors.append(error)
            if error.fate is Fate.UNCERTAIN:
                logger.info("no usable reply to the invoke: %s", error, extra={"session_id": self.session_id})
                if error.server_error:
                    self.shared.tell("server_error", self)
                return
            if not self._may_run():
                self.call = None
            pause_s = backoff_s(len(self.errors), first_s=0.25)
            if error.throttled:
                refused_s += time.monotonic() - self.sent_s
                self._check_throttling(error, first_s, refused_s)
                refused_s, down_s = refused_s + pause_s, 0.0
                continue
            down_s = down_s or self.sent_s
            # A runtime that was reached before has an outage. Otherwise, its address may be wrong.
            waits = error.credentials or (error.fate is Fate.TRANSIENT and self.shared.accepted_s)
            if time.monotonic() - down_s >= deadlines.start_s if waits else not self._sends_left():
                what = "refused the credentials" if error.credentials else "could not be reached"
                limit = f"for {deadlines.start_s:g} s" if waits else f"in {self.shared.max_attempts} attempts"
                raise RolloutLostError(f"the runtime {what} {limit}: {error}", code=error.code) from error.__cause__

    def _handle_reply(self, reply: dict[str, Any]) -> None:
        self.shared.accepted_s = time.monotonic()
        self.shared.runs_once = reply.get(RUNS_ONCE_FIELD) is True and self.shared.runs_once is not False
        asked = self.s3_bucket
        self.s3_bucket, self.result_key = str(reply.get("s3_bucket") or asked), str(reply["result_key"])
        if self.s3_bucket != asked and self.s3_bucket.lower().startswith(("file:", "memory:")):
            text = (
                f"the agent stores its record in {self.s3_bucket!r} on this machine, but the client asked for {asked!r}"
            )
            raise InvalidResultError(text)  # a session must not choose files of this machine
        self.reply = reply
        place = {"key": self.result_key, "bucket": self.s3_bucket}
        self.ledger.note(self.session_id, event="accepted", **place, promised=reply.get(REPLY_FIELD) == SCHEME)
        self.shared.tell("accepted", self, **place)
        self._accept()

    def _check_throttling(self, error: CallError, first_s: float, refused_s: float) -> None:
        """Raise RolloutThrottledError if the runtime has refused sessions for `throttle_s`."""
        now_s, limit_s = time.monotonic(), self.deadlines.throttle_s
        self.shared.pacer.start_refused(now_s)
        self.shared.tell("refused", self)
        if sum(e.throttled for e in self.errors) >= self.shared.max_attempts:
            # While the runtime accepts no rollout at all, the time in the queue counts, too.
            refused_s = max(refused_s, now_s - max(first_s, self.shared.accepted_s))
        if limit_s is not None and refused_s >= limit_s:
            text = f"the runtime refused for {refused_s:.0f} s ({error})"
            advice = "lower tps_limit or sessions_per_minute, or ask for a higher quota"
            raise RolloutThrottledError(f"{text}; {advice}", code=error.code) from error.__cause__

    def _may_run(self) -> bool:
        """Return True if an earlier invoke of this attempt may have started the session."""
        return any(error.fate is Fate.UNCERTAIN for error in self.errors)

    def _sends_left(self) -> bool:
        """Return True while fewer than `max_attempts` invokes failed, refusals apart."""
        failures = [error for error in self.errors if not (error.throttled or error.credentials)]
        return len(failures) < self.shared.max_attempts

    # ---- run and result

    async def _follow(self) -> Verdict | None:
        """Wait for the record and read it. Return None if the session shows no sign of life and the invoke may be sent again."""
        self._enter(Stage.RUN)
        shared, now_s = self.shared, time.monotonic()
        limits = (now_s, self.deadlines.run_s), (self.sent_s, self.timeout_s)
        ends_s = min((since_s + limit_s for since_s, limit_s in limits if limit_s is not None), default=None)
        check_key(self.result_key)
        watcher = self._watcher = shared.watcher(self)
        period_s: Any = (self.reply or {}).get("heartbeat_s")  # a promise of the agent
        promised = isinstance(period_s, (int, float)) and 0 < period_s < math.inf
        silence_s = shared.watch.lost_after_s
        if silence_s is None:
            silence_s = 3 * (period_s if promised else shared.watch.heartbeat_s) + 5
        waiter = watcher.add(self.result_key, self.session_id, expects_life=promised, silence_s=silence_s)
        try:
            accepted = self.reply is not None or (self.known is not None and self.known.accepted_s)
            if not accepted and not await self._shows_itself(watcher, waiter, ends_s):
                return None
            await self._record_exists(watcher, waiter, ends_s)
            self._enter(Stage.RESULT)
            verdict = await self._read()
            if verdict is None:
                raise RolloutLostError("the store listed the record, but does not have it")
            return verdict
        finally:
            watcher.remove(waiter)

    async def _record_exists(self, watcher: Watcher, waiter: Waiter, ends_s: float | None) -> None:
        """Wait until the record exists.

        Raises: RolloutTimeoutError at `ends_s` (monotonic); AgentError if its agent still calls the model then;
            RolloutLostError; StoreError.
        """
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        turns = None
        if left_s is not None:
            last_s = min(LAST_TURNS_S, left_s / 2)
            await asyncio.wait([waiter.found], timeout=left_s - last_s)
            left_s, turns = last_s, await self._count_turns(waiter)
        await asyncio.wait([waiter.found], timeout=left_s)
        if not waiter.found.done():
            await watcher.look_now(waiter)  # the record may be newer than the last round
        if not waiter.found.done():
            timeout, now = self._timed_out(), await self._count_turns(waiter)
            if turns is not None and now is not None and now > turns:
                text = f"the agent still called the model at its deadline, after {now} calls: {timeout}"
                raise AgentError(text, error_type="TimeoutError") from timeout
            raise timeout
        waiter.found.result()

    async def _count_turns(self, waiter: Waiter) -> int | None:
        """Count the model calls of the session so far. Return None if the count is unknown."""
        if waiter.found.done() or self.shared.turns_of is None:
            return None
        try:
            async with asyncio.timeout(COUNT_S):
                count = self.shared.turns_of(self.session_id)
                return await count if inspect.isawaitable(count) else count
        except Exception as e:  # the caller's function
            logger.warning("model calls could not be counted: %s", e, extra={"session_id": self.session_id})
            return None

    async def _shows_itself(self, watcher: Watcher, waiter: Waiter, ends_s: float | None) -> bool:
        """Wait for a heartbeat or a record after an invoke of uncertain fate. Return False if it may be sent again.

        Raises: RolloutLostError, or RolloutTimeoutError at `ends_s`.
        """
        error = self.errors[-1] if self.errors else None  # None: an earlier process sent the invoke
        failed = error is not None and error.server_error
        confirm_s = min(self.deadlines.confirm_s, CONFIRM_ERROR_S if failed else math.inf)
        if not failed:
            self._accept()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_s), asyncio.timeout(confirm_s):
                await waiter.seen_life.wait()
        if not waiter.seen_life.is_set():
            await watcher.look_now(waiter)  # a busy client may have had no round since the session began
        if waiter.seen_life.is_set():
            self._accept()
            return True
        if ends_s is not None and time.monotonic() >= ends_s:
            raise self._timed_out()
        why = "the reply to the invoke was lost"
        if failed:
            # A second delivery does no harm if the agent runs once per session.
            if self.shared.runs_once and self._sends_left():
                await asyncio.sleep(backoff_s(len(self.errors), first_s=0.5, most_s=10.0))
                return False
            times = sum(each.server_error for each in self.errors)
            why = f"the runtime failed to handle the invoke ({error}; {times} times)"
        text = f"{why}, and no heartbeat or record appeared within {confirm_s:g} s; the session is being stopped"
        raise RolloutLostError(text, code=error and error.code) from (error and error.__cause__)

    async def _read(self) -> Verdict | None:
        """Read the record, check its proof, and return the verdict. Return None if the record does not exist."""
        known, own = self.known, self.shared.proof_key(self.ledger)
        # An earlier process may have derived the secret from another key.
        secret = own.session_secret(self.session_id) if known is None or known.proof_key == own.id else None
        promised = known.promised if known is not None else (self.reply or {}).get(REPLY_FIELD) == SCHEME
        return await self.shared.read(self.s3_bucket, self.result_key, secret=secret, promised=promised)

    async def _read_known(self, known: Attempt) -> Verdict:
        """Read the record of a rollout that an earlier process finished. Without one, the ledger's entry decides."""
        self.s3_bucket, self.result_key = known.bucket, known.key
        verdict = await self._read()
        if verdict is not None:
            return verdict
        if known.outcome in (None, Outcome.OK):
            raise RolloutLostError("the ledger has the outcome ok, but the store no longer has the record")
        error = ERRORS[known.outcome](known.error or known.outcome)
        if known.cause is not None:
            error.cause = known.cause
        return Verdict(error=error)


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """The state that the rollouts of one client share.

    `submit`, `abandon`, `leave` and `flights` may be called from any thread. The other methods run on the client's loop.

    Attributes:
        limits: invokes per second, and new sessions per minute.
        max_attempts: the most invokes of one attempt that did not reach the runtime, while none did before.
        calls_at_once: the most invokes on the wire.
        turns_of: returns the number of model calls of a session so far.
        runs_once: True if the agent promises to run a session's payload once, however often it is delivered. Then an invoke that
            got a 500 or 503 may be sent again. None before the first reply. False is final.
        accepted_s: time of the last invoke that the runtime accepted (monotonic).
        counts: outcomes and events since the start, by name.
        stops: the stops of ended sessions.
    """

    portal: Portal
    transport: Transport
    pacer: Pacer
    limits: tuple[float, float | None]
    watch: WatchSettings
    deadlines: Deadlines
    exp_id: str
    max_attempts: int
    calls_at_once: int
    stores: dict[str, ObjectStore]
    turns_of: TurnsOf | None = None

    runs_once: bool | None = None
    accepted_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    subscribers: list[Subscriber] = field(default_factory=list)
    closing: bool = False

    def __post_init__(self) -> None:
        self._admission, self._calls = asyncio.Lock(), asyncio.Semaphore(self.calls_at_once)
        self.stops = Stops(self.transport, self.pacer, self.deadlines.stop_s, self._stopped)
        self._own_key, self._pid = ProofKey.new(), os.getpid()
        self._rollouts: dict[str, Rollout] = {}  # the key is the id of the first session
        self._watchers: dict[tuple[str, str], Watcher] = {}
        self._gets = 0
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self.pacer.join(self, *self.limits)
        open_dispatchers.add(self)

    # ---- from any thread

    def submit(self, rollout: Rollout) -> RolloutFuture:
        """Start a rollout, and return at once. Raises: ConfigError when its session has a rollout in flight."""
        check_session_id(rollout.session_id)
        if self.closing:
            raise ConfigError("the client is closed; create a new one")
        loop = self.portal.loop
        if self._rollouts.setdefault(rollout.session_id, rollout) is not rollout:
            raise ConfigError(f"session {rollout.session_id!r} has a rollout in flight; a session runs one at a time")
        loop.call_soon_threadsafe(rollout.start, functools.partial(self._rollouts.pop, rollout.session_id))
        return rollout

    def flights(self) -> list[dict[str, Any]]:
        """Return the state of each rollout without an outcome."""
        return [rollout.described() for rollout in list(self._rollouts.values())]

    def abandon(self) -> None:
        """End after the rollouts in flight. The caller dropped the client without `close`."""
        if self.portal.started:
            self.portal.submit(self._finish_and_leave())
        else:
            self.leave()

    def leave(self) -> None:
        """Free everything that is shared or open. The loop stays."""
        open_dispatchers.discard(self)
        if self._pid == os.getpid():  # a forked child may find their locks held
            self.pacer.leave(self)
            self.transport.close()

    # ---- on the loop

    async def close_async(self, *, cancel: Literal["all", "batches"] | None = None) -> list[str]:
        """End the rollouts in flight, then wait for the stops. Return and log the sessions that are not known to have ended."""
        self.closing = self.closing or cancel is not None
        for rollout in list(self._rollouts.values()):
            if cancel == "all" or (cancel == "batches" and rollout.index is not None):
                rollout._end(Verdict(error=RolloutCancelledError("the client was closed")))
        ending = [r._task for r in self._rollouts.values() if r.done() and r._task is not None]
        try:
            if ending:
                await asyncio.wait(ending, timeout=self.deadlines.stop_s)
            await self.stops.drain()
        finally:
            left = list(self.stops.left)
            _warn("%d sessions are not stopped and run until their idle timeout: %s", left)
        if cancel == "batches":
            running = [r.session_id for r in self._rollouts.values() if r.call is not None]
            _warn("%d sessions continue after the end of this process: %s", running)
        elif cancel:
            for watcher in self._watchers.values():
                watcher.close()
        return left

    async def _finish_and_leave(self) -> None:
        while self._rollouts:  # all have begun, because `submit` came before this
            await asyncio.wait([r._task for r in self._rollouts.values() if r._task is not None])
        await self.stops.drain()
        self.leave()
        self.portal.close()

    async def wait_for_turn(self) -> None:
        """Wait for a connection and for the pace, first come, first served. The caller then sends one invoke."""
        async with self._admission:
            await self._calls.acquire()
            try:
                if not self.accepted_s:
                    with contextlib.suppress(CallError):  # the invoke itself reports this error
                        await in_thread(lambda: self.transport.client)  # boto3 needs a second of CPU for its client
                await take_turn(self.pacer.try_start)
            except BaseException:
                self._calls.release()
                raise

    def invoke(self, session_id: str, body: bytes) -> asyncio.Future[bytes]:
        """Send one invoke, after `wait_for_turn`."""
        # Without a byte of the reply, an invoke ends within this time. A reply may also drip, or be a stream without end.
        limit_s = self.transport.read_timeout_s + CONNECT_TIMEOUT_S
        sent = within(in_thread(self.transport.invoke, session_id, body), limit_s)
        call: asyncio.Future[bytes] = asyncio.ensure_future(sent)
        call.add_done_callback(lambda _: self._calls.release())
        return call

    # ---- stores and proofs

    @property
    def store_requests(self) -> int:
        """Requests made to stores so far: listings by page, heads and gets."""
        return self._gets + sum(watcher.requests for watcher in self._watchers.values())

    @functools.cached_property
    def s3_region(self) -> str | None:
        """The region of the records' bucket. Agents that receive it save the 70 ms that botocore needs to find it."""
        return find_region(self.transport.region)

    def store(self, bucket: str) -> ObjectStore:
        """Open a store. Raises: ConfigError."""
        if bucket not in self.stores:
            self.stores[bucket] = open_store(bucket, default_region=self.transport.region)
        return self.stores[bucket]

    async def read(self, bucket: str, key: str, **trust: Any) -> Verdict | None:
        """Read and judge a record, a bounded number at a time (`read_record`)."""
        limits: dict[str, Any] = {"max_bytes": self.watch.max_record_bytes, "required": self.watch.require_proof}
        async with self._reads:
            self._gets += 1
            return await read_record(self.store(bucket), key, self.deadlines.result_s, **limits, **trust)

    def watcher(self, rollout: Rollout) -> Watcher:
        """Return the watcher of a rollout's experiment, or of its folder if the agent has its own key layout."""
        experiment = f"{rollout.config['exp_id']}/"
        root = experiment if rollout.result_key.startswith(experiment) else rollout.result_key.rpartition("/")[0] + "/"
        store = self.store(rollout.s3_bucket)
        if (store.url, root) not in self._watchers:
            options: dict[str, Any] = {"interval_s": self.watch.interval_s, "endings": self.transport.endings}
            self._watchers[store.url, root] = Watcher(store, root, **options)
        return self._watchers[store.url, root]

    def proof_key(self, ledger: FileLedger) -> ProofKey:
        """Return the key of sessions. The ledger's key lets a later process check their records."""
        return ledger.proof_key or self._own_key

    # ---- events

    def tell(self, event: str, rollout: Rollout | None = None, **fields: Any) -> None:
        """Count an event and hand it to the subscribers."""
        if event in COUNTS:
            self.counts[COUNTS[event]] += 1
        if not self.subscribers:
            return
        ids = {"exp_id": self.exp_id} if rollout is None else self._ids(rollout)
        for subscriber in self.subscribers:
            try:
                subscriber(event, {**ids, **fields})
            except BaseException:  # even a SystemExit must not end the loop of all rollouts
                logger.exception("a subscriber to rollout events raised")

    def ended(self, rollout: Rollout, verdict: Verdict, event: Literal["retried", "finished"]) -> None:
        """Report the end of an attempt that is tried again ("retried"), or of the rollout ("finished")."""
        if rollout.known is not None and rollout.known.outcome is not None:  # an earlier process reported it
            return
        outcome, cause, proof = verdict.outcome, verdict.cause, verdict.proof
        error = None if verdict.error is None else text_of(verdict.error)
        if proof is not None:
            self.counts[proof.value] += 1
        if proof is Proof.FORGED:
            logger.critical("security: %s", error, extra=self._ids(rollout))
        known: dict[str, Any] = {} if cause is None else {"cause": cause.value}
        known |= {"retried": True} if event == "retried" else {}
        rollout.ledger.note(rollout.session_id, event="done", outcome=outcome.value, error=error, **known)
        if event == "finished":
            self.counts[outcome.value] += 1
            if cause is not None:
                self.counts[f"cause_{cause.value}"] += 1
        if outcome is not Outcome.OK:
            text = "rollout ended as %s: %s" if event == "finished" else "attempt ended as %s, trying again: %s"
            logger.info(text, outcome, error, extra={**self._ids(rollout), "stage": rollout.stage.value})
        about = {"outcome": outcome.value, "cause": cause, "failure": verdict.failure, "error": error, "proof": proof}
        self.tell(event, rollout, index=rollout.index, stages=rollout.stages, **about)

    def _stopped(self, session_id: str, succeeded: bool) -> None:
        self.tell("stopped", session_id=session_id, gone=succeeded)

    def _ids(self, rollout: Rollout) -> dict[str, Any]:
        ids = {"session_id": rollout.session_id, "input_id": rollout.input_id}
        return {**ids, "exp_id": self.exp_id, "attempt": rollout.attempt}


# Dispatchers that may still have sessions to stop. The references are strong, because a dropped client must still stop them.
open_dispatchers: set[Dispatcher] = set()


@atexit.register
def _flush_at_exit() -> None:
    """Stop the sessions of batches. Other rollouts continue, and their records will be in the store."""
    for dispatcher in list(open_dispatchers):
        if dispatcher.portal.started:
            dispatcher.portal.call(dispatcher.close_async(cancel="batches"))


def _warn(message: str, session_ids: list[str]) -> None:
    if session_ids:
        logger.warning(message, len(session_ids), ", ".join(session_ids))
