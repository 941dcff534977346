"""One rollout: pace, invoke, watch, read, stop.

Theory of operation. A rollout is one task on its client's loop that walks through these stages, each with its deadline:

    queue   waits for a connection and for the pace of the agent; refusals are waited out up to `throttle_s`
    start   from the invoke on the wire until the runtime accepted it; back to the queue after a refusal
    run     until the record is in the store; back to the queue for the same invoke again, or for another attempt
    result  until the record is read; back to run if it is not there after all
    stop    in the background, after the future is resolved

A deadline counts its own stage only. Before it ends a rollout, there is one last look: an answer or a record that came while this
process stood still, or while it was busy, is in time.

An invoke is sent at most once per session. It is sent again only when the runtime answered that it did not take it
(429, 402, 409), when no connection was made, or when a second delivery does no harm (`Engine.runs_once`). When the answer is
missing, the session may run: the rollout looks for its heartbeat or record for `confirm_s` (`confirm_error_s` after a 500 or
503), and gives the session up (and stops it) only when there is none. A retry is a new attempt with a new session id.

When silence means loss. An agent that answers the invoke with ``heartbeat_s`` promises a heartbeat at that period; its silence
counts from the start. The silence of any other session (the published toolkit's, one without heartbeat, one whose answer was
lost) counts only after its first heartbeat. Other sessions do not matter.

In every case the task ends in exactly one `Verdict`, and every session that may exist goes to the stop queue.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..._portal import Portal
from ...contract import (
    ROLLOUT_FIELD,
    ROLLOUTS_OFF,
    RUNS_ONCE_FIELD,
    Cause,
    Outcome,
    Stage,
    alive_key,
    check_session_id,
    new_session_id,
    result_key,
)
from ...errors import (
    AgentCoreRLError,
    AgentError,
    ConfigError,
    InvalidResultError,
    RolloutCancelledError,
    RolloutLostError,
    RolloutThrottledError,
    RolloutTimeoutError,
)
from ...proof import PROOF_KEY_FIELD
from ...store import ObjectStore, open_store
from ...store.base import check_key
from ..data_plane.pacing import PaceLimits, Pacer, backoff_s
from ..data_plane.stops import StopQueue, take_turn
from ..data_plane.transport import (
    NO_CREDENTIALS,
    STORE_REFUSED,
    InvokeFailedError,
    InvokeRefusedError,
    InvokeServerError,
    InvokeUncertainError,
    Transport,
    in_thread,
    parse_reply,
    within,
)
from ..future import Progress, RolloutFuture, Verdict
from ..ledger import Attempt, FileLedger
from ..proofs import ANYTHING, Expected, Proofs, promises_proof
from ..records.results import ResultReader
from ..records.watcher import LOCAL_COST, LOCAL_INTERVAL_S, REMOTE_COST, REMOTE_INTERVAL_S, Waiter, Watcher
from ..settings import RETRYABLE, Deadlines, RolloutRequest, WatchSettings
from .events import Events

logger = logging.getLogger(__name__)


class Stores:
    """Opened stores, watchers and readers, by bucket. Lives on the engine's loop."""

    def __init__(self, bucket: str, store: ObjectStore, settings: WatchSettings, transport: Transport) -> None:
        self._settings, self._transport = settings, transport
        self._opened = {bucket: store}
        self._watchers: dict[tuple[str, str], Watcher] = {}
        self._readers: dict[str, ResultReader] = {}

    @property
    def requests(self) -> int:
        """Requests made to stores so far: listings by page, heads and gets."""
        return sum(w.requests for w in self._watchers.values()) + sum(r.requests for r in self._readers.values())

    def store(self, bucket: str) -> ObjectStore:
        """The opened store. Raises: ConfigError."""
        if bucket not in self._opened:
            self._opened[bucket] = open_store(bucket, default_region=self._transport.region)
        return self._opened[bucket]

    def reader(self, bucket: str) -> ResultReader:
        """The reader of a store."""
        if bucket not in self._readers:
            self._readers[bucket] = ResultReader(self.store(bucket), self._settings.max_record_bytes)
        return self._readers[bucket]

    def watcher(self, progress: Progress) -> Watcher:
        """The watcher of a rollout's experiment."""
        root = progress.root
        if not progress.key.startswith(root):  # an agent with a key layout of its own
            root = progress.key.rpartition("/")[0] + "/"
        store = self.store(progress.bucket)
        if (store.url, root) not in self._watchers:
            local = store.url.startswith(("file:", "memory:"))
            usual_s, cost = (LOCAL_INTERVAL_S, LOCAL_COST) if local else (REMOTE_INTERVAL_S, REMOTE_COST)
            interval_s = usual_s if self._settings.interval_s is None else self._settings.interval_s
            endings = self._transport.endings
            self._watchers[store.url, root] = Watcher(store, root, interval_s=interval_s, cost=cost, endings=endings)
        return self._watchers[store.url, root]

    def close(self) -> None:
        """Stop watching."""
        for watcher in self._watchers.values():
            watcher.close()


class NoSignError(Exception):
    """The answer to the invoke is missing, and neither a heartbeat nor a record appeared."""


class AttemptEnded(Exception):  # noqa: N818  (a way out, not an error)
    """The attempt is over, with this verdict."""

    def __init__(self, outcome: Outcome, error: BaseException) -> None:
        super().__init__(str(error))
        self.verdict = Verdict(outcome=outcome, error=error)


class Engine:
    """The rollouts of one client and what they share. `submit`, `refuse_more` and `flights` may be called from any thread; the
    rest lives on the client's loop.

    Attributes:
        max_attempts: how often an invoke that the runtime did not take is sent.
        runs_once: whether the agent says that it runs a session's payload once however often it is delivered. Then an invoke
            that was answered with 500 or 503 may be sent again. None: no answer yet. False stays.
        left: sessions that are due to be stopped and not known to be gone.
        accepted_s: when the runtime last accepted an invoke (monotonic).
    """

    def __init__(
        self,
        *,
        portal: Portal,
        transport: Transport,
        pacer: Pacer,
        limits: PaceLimits,
        bucket: str,
        store: ObjectStore,
        watch: WatchSettings,
        deadlines: Deadlines,
        exp_id: str,
        max_attempts: int,
        calls_at_once: int,
    ) -> None:
        self.portal, self.transport, self.pacer, self.watch = portal, transport, pacer, watch
        self.max_attempts, self._limits = max_attempts, limits
        self.events = Events(exp_id)
        self.proofs = Proofs(required=watch.require_proof)
        self.stores = Stores(bucket, store, watch, transport)
        self.runs_once: bool | None = None
        self.accepted_s = 0.0
        self._admission = asyncio.Lock()
        self._stops = StopQueue(transport, pacer, deadlines.stop_s)
        self._stop_s, self.left = deadlines.stop_s, self._stops.left
        self._calls = asyncio.Semaphore(calls_at_once)
        self._rollouts: dict[RolloutFuture, Rollout] = {}
        self._closing = False
        self.pacer.join(limits)
        open_engines.add(self)

    # ---- from any thread

    def submit(self, request: RolloutRequest, adopted: Attempt | None = None) -> RolloutFuture:
        """Start a rollout; returns at once. One that is ``adopted`` from an earlier process is not started but waited for."""
        check_session_id(request.session_id)
        if self._closing:
            raise ConfigError("the client is closed; make a new one")
        loop = self.portal.loop
        rollout = Rollout(self, request, adopted)
        if self.portal.on_own_thread:
            self._launch(rollout)
        else:
            loop.call_soon_threadsafe(self._launch, rollout)
        return rollout.future

    def refuse_more(self) -> None:
        """From now on, `submit` raises."""
        self._closing = True

    def leave(self) -> None:
        """Nothing comes from here any more."""
        self.pacer.leave(self._limits)
        open_engines.discard(self)

    def flights(self) -> list[dict[str, Any]]:
        """Where each rollout without a verdict is."""
        return [rollout.described() for rollout in list(self._rollouts.values())]

    # ---- on the loop

    async def close_async(self, *, cancel: Literal["all", "batches"] | None = None) -> list[str]:
        """End what runs, then wait for the stops. Gives, and logs, the sessions that are not known to be gone."""
        self._closing = self._closing or cancel is not None
        for rollout in list(self._rollouts.values()):
            if cancel == "all" or (cancel == "batches" and rollout.request.index is not None):
                error = RolloutCancelledError("the client was closed")
                rollout.end(Verdict(outcome=Outcome.CANCELLED, error=error))
        try:
            ending = [r.task for r in self._rollouts.values() if r.task is not None and r.forced is not None]
            if ending:
                await asyncio.wait(ending, timeout=self._stop_s)
            await self._stops.drain()
        finally:
            left = list(self.left)
            _warn("%d sessions are not stopped and run until their idle timeout: %s", left)
        if cancel == "batches":
            running = [r.progress.session_id for r in self._rollouts.values() if r._invoke is not None]
            _warn("%d sessions run on after the end of this process: %s", running)
        elif cancel:
            self.stores.close()
        return left

    def _launch(self, rollout: Rollout) -> None:
        if self._closing:
            rollout.resolve()
            return
        self._rollouts[rollout.future] = rollout
        rollout.start().add_done_callback(lambda _: self._rollouts.pop(rollout.future, None))

    async def wait_for_turn(self) -> None:
        """Wait for a connection and for the pace, first come, first served. The caller sends one invoke at once."""
        async with self._admission:
            await self._calls.acquire()
            try:
                if not self.accepted_s:
                    await in_thread(lambda: self.transport.client)  # which takes a second of CPU to make
                await take_turn(self.pacer.try_start)
            except BaseException:
                self._calls.release()
                raise

    def invoke(self, session_id: str, body: bytes) -> asyncio.Future[bytes]:
        """Send one invoke, after `wait_for_turn`. Gives the answer as it came."""
        call: asyncio.Future[bytes] = asyncio.ensure_future(in_thread(self.transport.invoke, session_id, body))
        call.add_done_callback(lambda _: self._calls.release())
        return call

    def stop(
        self, session_id: str, ledger: FileLedger | None, after: asyncio.Future[bytes] | None = None
    ) -> asyncio.Task[bool]:
        """Stop a session in the background."""
        return self._stops.put(session_id, lambda gone: self.events.stopped(session_id, ledger, gone), after)


# Engines that may still have sessions to stop. Strong on purpose: a dropped client must not take its stops with it.
open_engines: set[Engine] = set()


def _warn(message: str, session_ids: Sequence[str]) -> None:
    if session_ids:
        logger.warning(message, len(session_ids), ", ".join(session_ids))


@atexit.register
def _flush_at_exit() -> None:
    """Stop what batches started. Other rollouts run on: their records will be in the store."""
    for engine in list(open_engines):
        if engine.portal.started:
            engine.portal.call(engine.close_async(cancel="batches"))


class Rollout:
    """One rollout of a client, with all its attempts. ``future`` is its handle for the caller."""

    def __init__(self, engine: Engine, request: RolloutRequest, adopted: Attempt | None) -> None:
        self.request = request
        self.progress = Progress(
            session_id=request.session_id, input_id=request.input_id, attempt=request.first_attempt
        )
        self.future = RolloutFuture(
            engine.portal, self.progress, self.end, raise_failures=request.on_failure == "raise"
        )
        self.task: asyncio.Task[None] | None = None
        self.forced: Verdict | None = None  # the verdict that the owner of the future asked for
        self._engine = engine
        self._adopted = adopted
        self._invoke: asyncio.Future[bytes] | None = None  # on the wire or answered; None while no session can exist
        self._sent_s = 0.0  # when the invoke was sent (monotonic)
        self._server_errors = 0  # answers of this attempt that said 500 or 503
        self._server_error: Exception | None = None  # the last answer, when it was one of them
        self._stop: asyncio.Task[bool] | None = None  # of the last session
        self._expected: Expected = ANYTHING  # of the record of the session under way

    # ---- the whole rollout

    def start(self) -> asyncio.Task[None]:
        """Begin, on the loop."""
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._settled)
        return self.task

    def end(self, verdict: Verdict) -> None:
        """End it with this verdict, on the loop. The first call counts."""
        if self.task is not None and not self.task.done() and self.forced is None:
            self.forced = verdict
            self.task.cancel()

    def resolve(self, verdict: Verdict | None = None) -> None:
        """Resolve the future, and report the outcome. Without a verdict: the one that was asked for, or `cancelled`."""
        progress = self.progress
        verdict = verdict or self.forced
        if verdict is None:
            verdict = Verdict(outcome=Outcome.CANCELLED, error=RolloutCancelledError("the client's loop ended"))
        if isinstance(verdict.error, AgentCoreRLError):
            verdict.error.session_id = verdict.error.session_id or progress.session_id
            verdict.error.input_id = verdict.error.input_id or progress.input_id
            verdict.error.key = verdict.error.key or progress.key or None
        verdict = self.future._claim(verdict)  # its owner may have cancelled it meanwhile
        try:
            self._engine.events.finished(self.request, progress, verdict)
        finally:
            self.future._resolve()

    def _settled(self, _: asyncio.Task[None]) -> None:
        if self.future._done.done():
            return
        if self._adopted is not None:  # cancelled before its first step: the coroutine never ran
            self._stop = self._engine.stop(self.progress.session_id, self.request.ledger)
        self.resolve()

    async def _run(self) -> None:
        request, progress = self.request, self.progress
        verdict: Verdict | None = None
        try:
            while True:
                verdict = await self._attempt()
                tried = progress.attempt - request.first_attempt
                # The earlier process died before it could send this, or nothing came of it: gone first, then again.
                unsent = (
                    self._adopted is not None and self._adopted.accepted_s is None and verdict.outcome is Outcome.LOST
                )
                if not unsent and (tried >= request.retries or verdict.outcome not in RETRYABLE):
                    break
                self._engine.events.retried(request, progress, verdict)
                if unsent and self._stop is not None:
                    await asyncio.wait([self._stop])
                progress.restart(new_session_id())
                self._adopted = None
        except asyncio.CancelledError:
            verdict = None
        except BaseException as e:  # a SystemExit of `prepare` would end the loop of all rollouts
            logger.exception("rollout failed inside the client", extra={"session_id": progress.session_id})
            verdict = Verdict(outcome=Outcome.LOST, error=_as_error(e))
        self.resolve(verdict)

    def described(self) -> dict[str, Any]:
        """Where it is, for its owner. Units: seconds; ``left_s`` until the stage's deadline."""
        progress, request = self.progress, self.request
        stage, stages = progress.stage, progress.stages()
        stage_s = time.monotonic() - progress.entered_s
        limit_s: float | None = getattr(request.deadlines, f"{stage.value}_s")
        left = [] if limit_s is None else [limit_s - stage_s]
        if request.timeout_s is not None and stage in (Stage.START, Stage.RUN):
            left.append(request.timeout_s - (time.monotonic() - self._sent_s))
        trouble = progress.trouble()
        return {
            "session_id": progress.session_id,
            "input_id": progress.input_id,
            "attempt": progress.attempt,
            "stage": stage.value,
            "stage_s": stage_s,
            "total_s": sum(stages.values()),
            "left_s": min(left, default=None),
            "trouble": None if trouble is None else str(trouble),
        }

    # ---- one attempt

    async def _attempt(self) -> Verdict:
        """One session from its place in the queue to its verdict."""
        session_id, engine = self.progress.session_id, self._engine
        self._invoke, self._stop, self._server_errors, self._server_error = None, None, 0, None
        adopted, ledger = self._adopted is not None, self.request.ledger
        try:
            return await self._session()
        except AttemptEnded as e:
            error = e.verdict.error
            if error is not None and error.__cause__ is None and e.__cause__ is not error:
                error.__cause__ = e.__cause__  # what boto3 or the store said stays visible
            return e.verdict
        finally:
            call = self._take_invoke()
            if call is not None or adopted:
                self._stop = engine.stop(session_id, ledger, call)
            elif ledger is not None:  # no session can exist
                ledger.note(session_id, event="stopped")

    def _take_invoke(self) -> asyncio.Future[bytes] | None:
        """The invoke whose session has to be stopped, if there is one."""
        call, self._invoke = self._invoke, None
        return call

    async def _session(self) -> Verdict:
        request, progress, engine = self.request, self.progress, self._engine
        config = dict(request.config)
        if request.prepare is not None:
            extra = request.prepare(progress.session_id, progress.attempt)
            config.update(await extra if inspect.isawaitable(extra) else extra)
        adopted, ledger = self._adopted, request.ledger
        key = engine.proofs.key(ledger)
        progress.proof_key = key.id if adopted is None else adopted.proof_key
        progress.promised = adopted is not None and adopted.promised
        config[PROOF_KEY_FIELD] = key.session_secret(progress.session_id)
        body, bucket = self._encode(config)
        if adopted is not None:
            progress.bucket, progress.key = adopted.bucket, adopted.key
            self._sent_s = time.monotonic()
            self._accept()
        else:
            engine.events.intent(request, progress)
        while True:
            reply: dict[str, Any] | None = None
            if adopted is None:
                reply = await self._get_accepted(body)
            if reply is not None:
                progress.bucket, progress.key = place_of_record(reply, bucket)
                progress.agent_reply = reply
                progress.promised = promises_proof(reply)
                engine.events.accepted(request, progress)
            self._expected = engine.proofs.expected(
                progress.session_id, ledger, key_id=progress.proof_key, promised=progress.promised
            )
            if reply is not None or self._server_error is None:
                self._accept()
            self.progress.enter(Stage.RUN)
            try:
                return await self._follow(reply)
            except NoSignError as e:
                if not await self._may_start_again():
                    raise AttemptEnded(Outcome.LOST, RolloutLostError(str(e))) from self._server_error

    def _encode(self, config: dict[str, Any]) -> tuple[bytes, str]:
        """The invoke's body, and the bucket that it names. Sets where the record is expected."""
        request, progress = self.request, self.progress
        config.setdefault("attempt", progress.attempt)
        config.setdefault("heartbeat_s", self._engine.watch.heartbeat_s)
        try:
            body = json.dumps({**request.payload, ROLLOUT_FIELD: config}).encode()
            key = result_key(config["exp_id"], config["input_id"], progress.session_id)
            self._engine.stores.store(str(config["s3_bucket"])).check_writable(alive_key(key))
        except (TypeError, ValueError) as e:
            raise AttemptEnded(Outcome.INVALID, ConfigError(f"the payload cannot be sent: {e}")) from e
        progress.bucket, progress.key = str(config["s3_bucket"]), key
        progress.root = key.removesuffix(f"{request.input_id}/{progress.session_id}.json")
        return body, progress.bucket

    def _accept(self) -> None:
        """The invoke was accepted, or may have been: a caller that waits for that goes on."""
        if not self.future._accepted.done():
            self.future._accepted.set_result(None)

    def _timed_out(self, stage: Stage) -> AttemptEnded:
        """The end of an attempt whose deadline passed in a stage."""
        spent_s = self.progress.stages().get(stage.value, 0.0)
        timeout_s = self.request.timeout_s
        own = timeout_s is not None and stage is not Stage.QUEUE
        text = f"Timeout after {timeout_s:g}s" if own else "deadline passed"
        trouble = self.progress.trouble()
        why = f"; its record could not be looked for: {trouble}" if trouble is not None else ""
        error = RolloutTimeoutError(f"{text} (stage: {stage.value}, {spent_s:.1f} s in it){why}", stage=stage.value)
        return AttemptEnded(Outcome.TIMEOUT, error)

    # ---- queue and start

    async def _get_accepted(self, body: bytes) -> dict[str, Any] | None:
        """Get the invoke accepted. None: it went out, and whether it was accepted is unknown."""
        request, progress, engine = self.request, self.progress, self._engine
        deadlines, session_id = request.deadlines, progress.session_id
        self._server_error = None
        patience_s = deadlines.start_s if request.timeout_s is None else min(deadlines.start_s, request.timeout_s)
        failures = refusals = 0
        pause_s = refused_s = waited_s = 0.0  # when the first refused invoke was sent; refused invokes and their pauses
        while True:
            progress.enter(Stage.QUEUE)
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(deadlines.queue_s):
                    await engine.wait_for_turn()
                progress.enter(Stage.START)
                self._sent_s = time.monotonic()
                self._invoke = engine.invoke(session_id, body)
                reply = parse_reply(await within(self._invoke, patience_s), session_id)
                self._server_error, engine.accepted_s = None, time.monotonic()
                engine.runs_once = reply.get(RUNS_ONCE_FIELD) is True and engine.runs_once is not False
                return reply
            except InvokeServerError as e:
                self._server_errors, self._server_error = self._server_errors + 1, e
                engine.events.tell("server_error", progress)
                if not engine.runs_once or self._server_errors >= engine.max_attempts:
                    return None
                logger.info("sending the invoke again after %s", e, extra={"session_id": session_id})
                pause_s = self._error_pause_s()
            except InvokeRefusedError as e:
                if not self._server_errors:  # of an earlier delivery there may be a session
                    self._invoke = None
                throttled = e.kind == "throttled"
                refusals, failures = refusals + throttled, failures + (not throttled)
                pause_s = backoff_s(refusals + failures, base_s=0.25, cap_s=5.0, jitter=random.random())
                if throttled:
                    refused_s, waited_s = refused_s or self._sent_s, waited_s + time.monotonic() - self._sent_s
                    # Where the runtime takes nothing at all, the queue does not move because of that and not by itself.
                    idle_s = (
                        time.monotonic() - max(refused_s, engine.accepted_s) if refusals >= engine.max_attempts else 0.0
                    )
                    self._throttled(e, max(waited_s, idle_s))
                    waited_s += pause_s
                elif failures >= engine.max_attempts:
                    raise _refused(e, failures) from e
            except InvokeUncertainError as e:
                self._server_error = None
                text = "no answer to the invoke (%s); looking for signs of the session"
                logger.info(text, e, extra={"session_id": session_id})
                return None
            except InvokeFailedError as e:
                raise self._failed(e) from e
            except ConfigError as e:  # there is no client to send with: a profile that does not exist, no region
                self._invoke = None
                raise AttemptEnded(Outcome.INVALID, e) from e
            except TimeoutError as e:
                if progress.stage is Stage.QUEUE or patience_s == request.timeout_s:
                    raise self._timed_out(progress.stage) from e
                self._server_error = None
                return None

    def _throttled(self, e: InvokeRefusedError, refused_s: float) -> None:
        """The runtime refused to take more sessions, for so long by now. Raises: AttemptEnded after `throttle_s`."""
        self._engine.pacer.start_refused(time.monotonic())
        self._engine.events.tell("refused", self.progress)
        limit_s = self.request.deadlines.throttle_s
        if limit_s is not None and refused_s >= limit_s:
            error = RolloutThrottledError(
                f"the runtime refused for {refused_s:.0f} s ({e}); lower tps_limit or sessions_per_minute, or ask for a "
                "higher quota"
            )
            raise AttemptEnded(Outcome.THROTTLED, error) from e

    def _failed(self, e: InvokeFailedError) -> AttemptEnded:
        """The verdict for an invoke that was refused for good or answered with an error."""
        # AWS says no more than this: it did not come up, died, or answered 4xx or 5xx
        if e.code == "RuntimeClientError" and "(403)" in str(e):
            return AttemptEnded(Outcome.INVALID, ConfigError(f"the agent refused the rollout: {ROLLOUTS_OFF} ({e})"))
        if e.code == "RuntimeClientError":
            error = RolloutLostError(f"the session ended, or its agent failed, before it took the invoke: {e}")
            return AttemptEnded(Outcome.LOST, error)
        if e.code == STORE_REFUSED:
            return AttemptEnded(Outcome.LOST, RolloutLostError(str(e)))
        if e.code == "AgentRefused":
            return AttemptEnded(Outcome.AGENT_ERROR, AgentError(str(e), error_type=e.code))
        if e.code == "BadReply":
            return AttemptEnded(Outcome.INVALID, InvalidResultError(str(e)))
        if not self._server_errors:
            self._invoke = None  # refused before any session existed
        if e.code == NO_CREDENTIALS:
            return AttemptEnded(Outcome.INVALID, ConfigError(str(e)))
        return AttemptEnded(Outcome.INVALID, ConfigError(f"the runtime does not accept this request: {e}"))

    async def _may_start_again(self) -> bool:
        """After an answer of 500 or 503, when no sign of the session was seen: whether the same invoke may be sent again.

        It may where the agent is known by now to run once, and where the runtime says that there is no such session. Where there
        was one, this ends it.
        """
        engine = self._engine
        if self._server_error is None or self._server_errors >= engine.max_attempts:
            return False
        if not engine.runs_once:
            await take_turn(engine.pacer.try_stop)
            try:
                stop = in_thread(engine.transport.stop, self.progress.session_id)
                if await within(stop, self.request.deadlines.stop_s):
                    return False
            except (InvokeRefusedError, InvokeUncertainError, InvokeFailedError, TimeoutError) as e:
                logger.info("the runtime could not be asked for the session: %s", e)
                return False
        await asyncio.sleep(self._error_pause_s())
        return True

    def _error_pause_s(self) -> float:
        return backoff_s(self._server_errors, base_s=0.5, cap_s=10.0, jitter=random.random())

    # ---- run and result

    async def _follow(self, reply: Mapping[str, Any] | None) -> Verdict:
        """Wait for the record and read it; `reply` is the answer to the invoke, None when it was lost or not ours to see.

        Raises: AttemptEnded when the session is lost, or its record can be nowhere; NoSignError when there is no reply and the
            session does not show itself.
        """
        progress, engine = self.progress, self._engine
        limits = (time.monotonic(), self.request.deadlines.run_s), (self._sent_s, self.request.timeout_s)
        ends_s = min((since_s + limit_s for since_s, limit_s in limits if limit_s is not None), default=None)
        heartbeat_s = promised_heartbeat_s(reply)
        try:
            engine.stores.store(progress.bucket)
            check_key(progress.key)
        except ConfigError as e:
            text = f"no record can be at {progress.key!r} in {progress.bucket!r}: {e}"
            error = InvalidResultError(text, cause=Cause.INFRASTRUCTURE)
            raise AttemptEnded(Outcome.INVALID, error) from e
        watcher = engine.stores.watcher(progress)
        silence_s = engine.watch.silence_s(heartbeat_s)
        waiter = watcher.add(progress.key, expects_life=heartbeat_s is not None, silence_s=silence_s)
        progress.trouble = lambda: watcher.trouble
        reader = engine.stores.reader(progress.bucket)
        try:
            unsure = reply is None and not (self._adopted is not None and self._adopted.accepted_s)
            while True:
                await self._find(watcher, waiter, unsure, ends_s)
                self.progress.enter(Stage.RESULT)
                verdict = await reader.read(progress.key, self.request.deadlines.result_s, self._expected)
                if verdict is not None:
                    return verdict
                progress.enter(Stage.RUN)  # listed, but not there: the store is the truth
                waiter, unsure = watcher.missing(waiter), False
        except RolloutLostError as e:
            raise AttemptEnded(Outcome.LOST, e) from e
        finally:
            watcher.remove(waiter)

    async def _find(self, watcher: Watcher, waiter: Waiter, unsure: bool, ends_s: float | None) -> None:
        """Wait until the record exists, up to a monotonic time. `unsure`: wait for a sign of the session first.

        Raises: AttemptEnded at that time; NoSignError; RolloutLostError.
        """
        try:
            async with asyncio.timeout_at(ends_s):
                if unsure:
                    await self._confirm(watcher, waiter)
                    self._accept()
                await asyncio.wait([waiter.found])
        except TimeoutError as e:
            await watcher.look_now(waiter)  # it may be there since the last look
            if not waiter.found.done():
                raise self._timed_out(Stage.RUN) from e
        waiter.found.result()

    async def _confirm(self, watcher: Watcher, waiter: Waiter) -> None:
        """After an invoke of unknown fate: wait until the session shows itself. Raises: NoSignError."""
        deadlines = self.request.deadlines
        confirm_s = deadlines.confirm_s if self._server_error is None else deadlines.confirm_error_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(confirm_s):
                await waiter.seen_life.wait()
        if not waiter.seen_life.is_set():
            await watcher.look_now(waiter)  # a busy client may not have looked since the session began
        if waiter.seen_life.is_set():
            return
        why = "the answer to the invoke was lost"
        if self._server_error is not None:
            times = f"{self._server_errors} times"
            why = f"the runtime answered the invoke with an error of its own ({self._server_error}; {times})"
        raise NoSignError(
            f"{why}, and no heartbeat or record appeared within {confirm_s:g} s; the session is being stopped"
        )


def place_of_record(reply: Mapping[str, Any], asked: str) -> tuple[str, str]:
    """Bucket and key of the record, as the agent's answer names them; `asked` is the bucket that it was asked to use.

    Raises: AttemptEnded when it names files or memory of this machine instead: a session does not choose what is read here.
    """
    bucket, key = str(reply.get("s3_bucket") or asked), str(reply["result_key"])
    if bucket != asked and bucket.lower().startswith(("file:", "memory:")):
        text = (
            f"the agent answered that its record is in {bucket!r}, on this machine, but it was asked to use {asked!r}"
        )
        raise AttemptEnded(Outcome.INVALID, InvalidResultError(text))
    return bucket, key


def promised_heartbeat_s(reply: Mapping[str, Any] | None) -> float | None:
    """The period of the heartbeat that an agent promises in its answer; None when it promises none."""
    value = (reply or {}).get("heartbeat_s")
    return float(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


def _as_error(e: BaseException) -> Exception:
    """An exception of `prepare`. One without a text, or one that ends a loop, becomes an error of ours."""
    with contextlib.suppress(BaseException):
        if isinstance(e, Exception) and str(e) is not None:
            return e
    return RolloutLostError(f"prepare raised {type(e).__name__}")


def _refused(e: InvokeRefusedError, times: int) -> AttemptEnded:
    if e.kind == "busy":
        return AttemptEnded(Outcome.THROTTLED, RolloutThrottledError(f"refused {times} times: {e}"))
    return AttemptEnded(Outcome.LOST, RolloutLostError(f"the runtime could not be reached in {times} tries: {e}"))
