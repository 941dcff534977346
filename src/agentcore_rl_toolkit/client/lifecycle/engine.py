"""Runs rollouts: pace, invoke, watch, read, stop. One engine per client, on the client's own loop.

Theory of operation. A rollout is one task that walks through the stages::

    queue  -> a slot of the pace is free          (deadline queue_s; refusals are waited out up to throttle_s)
    start  -> the runtime accepted the invoke     (start_s)
    run    -> the record is in the store          (run_s; silence of the heartbeat ends it as `lost`)
    result -> the record is read                  (result_s)
    stop   -> in the background, after the future is resolved

An invoke is sent at most once per session. It is sent again only when the runtime answered that it did not take it
(429, 402, 409), when no connection came about, or when a second delivery does no harm (`delivery`). When the answer is
missing, the session may run: the engine looks for its heartbeat or record for `confirm_s` (`confirm_error_s` where the
runtime answered 500 or 503) and gives the session up (and stops it) only when there is none. A retry is a new attempt
with a new session id.

Whatever happens, the task ends in exactly one `Verdict`, and every session that may exist is handed to the stop queue.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any

from ..._portal import Portal
from ...contract import ROLLOUT_FIELD, Outcome, Stage, check_session_id, new_session_id, result_key
from ...errors import AgentCoreRLError, ConfigError, RolloutCancelledError, RolloutLostError, RolloutTimeoutError
from ...proof import PROOF_KEY_FIELD
from ...store import ObjectStore
from ..data_plane.delivery import AgentWord, Resend
from ..data_plane.endings import Endings, asks_for_endings
from ..data_plane.pacing import Pacer
from ..data_plane.stops import StopQueue
from ..data_plane.transport import AgentTransport
from ..future import Progress, RolloutFuture, Verdict
from ..proofs import Proofs, promises_proof
from ..records.push import PushListener
from ..records.results import ResultReader
from ..settings import RolloutRequest, WatchSettings
from .events import Events
from .flight import Adoption, AttemptEnded, Flight, NoSignError, attempt_limit, described, timed_out
from .following import Follower, place_of_record
from .invoking import Invoker

logger = logging.getLogger(__name__)

LINGER_S = 0.5


class Engine:
    """Everything that happens to rollouts between `submit` and their verdict. Public methods are thread-safe."""

    def __init__(
        self,
        *,
        portal: Portal,
        transport: AgentTransport,
        pacer: Pacer,
        store_for: Callable[[str], ObjectStore],
        watch: WatchSettings,
        events: Events,
        proofs: Proofs,
        word: AgentWord,
        resend: Resend,
        max_attempts: int,
        pool_size: int,
        stop_s: float,
        listen: bool = False,
        notify_url: str | None = None,
    ) -> None:
        self._portal = portal
        self._transport = transport
        self._pacer = pacer
        self._watch = watch
        self.events = events
        endings = Endings(asks_for_endings(transport))
        self._follower = Follower(store_for, watch, endings, events.watching_failed, events.names_skipped)
        self.proofs = proofs
        self._invoker = Invoker(
            transport,
            pacer,
            events,
            word=word,
            resend=resend,
            max_attempts=max_attempts,
            pool_size=pool_size,
            room=lambda: self.stops().room(),
        )
        self._stop_s = stop_s
        self._notify_url = notify_url
        self._listener = PushListener(self._notified) if listen and notify_url is None else None
        self._flights: dict[RolloutFuture, Flight] = {}
        self._sessions: dict[str, Flight] = {}
        self._stops: StopQueue | None = None
        self._closing = False

    # ---- from any thread

    def submit(self, request: RolloutRequest, *, adopt: Adoption | None = None) -> RolloutFuture:
        """Start a rollout; returns at once. With `adopt` its session is not started but waited for."""
        check_session_id(request.session_id)
        if self._closing:
            raise ConfigError("the client is closed; make a new one")
        progress = Progress(session_id=request.session_id, input_id=request.input_id, attempt=request.first_attempt)
        progress.enter(Stage.QUEUE)
        future = RolloutFuture(self, progress, raise_failures=request.on_failure == "raise")
        flight = Flight(request, future, progress, adopted=adopt)
        loop = self._portal.loop
        if self._portal.on_own_thread:
            self._launch(flight)
        else:
            loop.call_soon_threadsafe(self._launch, flight)
        return future

    def expire(self, future: RolloutFuture, timeout_s: float) -> None:
        """End a rollout because its owner waited long enough."""
        stage = future.stage
        error = RolloutTimeoutError(
            f"the rollout is not over after {timeout_s:g} s (stage: {stage.value}); its session is being stopped",
            stage=stage.value,
            session_id=future.session_id,
            input_id=future.input_id,
        )
        self._portal.post(self._force, future, Verdict(outcome=Outcome.TIMEOUT, error=error))

    def abort(self, future: RolloutFuture) -> None:
        """End a rollout because its owner does not want it any more."""
        self._portal.post(self.abort_now, future)

    def abort_now(self, future: RolloutFuture) -> None:
        """`abort`, on the loop."""
        error = RolloutCancelledError("the rollout was cancelled")
        self._force(future, Verdict(outcome=Outcome.CANCELLED, error=error))

    def refuse_own_thread(self) -> None:
        """Raises: ConfigError on the engine's own thread, where waiting would never end."""
        self._portal.refuse_own_thread()

    def refuse_more(self) -> None:
        """From now on, `submit` raises."""
        self._closing = True

    def notify(self, session_id: str) -> None:
        """Someone says that a session has finished: look at its record now."""
        self._portal.post(self._notified, session_id)

    @property
    def in_flight(self) -> int:
        """Rollouts without a verdict."""
        return len(self._flights)

    def flights(self) -> list[dict[str, Any]]:
        """Where each of them is. From any thread."""
        return [described(flight) for flight in list(self._flights.values())]

    @property
    def store_requests(self) -> int:
        """Requests made to stores so far: listings by page, heads and gets."""
        return self._follower.requests

    @property
    def skipped_names(self) -> int:
        """Names that listings of stores left out so far because they are no objects."""
        return self._follower.skipped

    @property
    def stop_backlog(self) -> int:
        """Sessions whose stop is still open."""
        return self._stops.backlog if self._stops is not None else 0

    # ---- on the loop

    def reader(self, bucket: str) -> ResultReader:
        """The reader of a store."""
        return self._follower.reader(bucket)

    def stops(self) -> StopQueue:
        """The stop queue (made on the loop)."""
        if self._stops is None:
            self._stops = StopQueue(self._transport, self._pacer, self._stop_s, self.events.stopped)
        return self._stops

    def stop_silent(
        self, session_id: str, bucket: str, key: str, after: asyncio.Future[bytes] | None = None
    ) -> asyncio.Task[None]:
        """Stop a session that left no record, then remove its heartbeat, which nothing else would."""

        async def tidy() -> None:
            await self._follower.remove_heartbeat(bucket, key)

        return self.stops().put(session_id, after=after, tidy=tidy)

    async def close_async(self, *, cancel: bool) -> None:
        """End what runs (with `cancel`), then wait for the stops up to their deadline."""
        self._closing = self._closing or cancel
        if cancel:
            for future in list(self._flights):
                error = RolloutCancelledError("the client was closed")
                self._force(future, Verdict(outcome=Outcome.CANCELLED, error=error))
        ending = [f.task for f in self._flights.values() if f.task is not None and f.forced is not None]
        if ending:
            await asyncio.wait(ending)
        if self._stops is not None:
            await self._stops.drain(self._stop_s)
        if cancel:
            self._follower.close()
            self._invoker.close()
            if self._stops is not None:
                self._stops.close()
        if cancel and self._listener is not None:
            await self._listener.close()

    async def linger_async(self) -> None:
        """Wait until nothing is left to do: for a client that was dropped without `close`."""
        while True:
            await asyncio.sleep(LINGER_S)
            if not (self._flights or self.stop_backlog):
                break
        await self.close_async(cancel=True)

    def _launch(self, flight: Flight) -> None:
        if self._closing:
            self._resolve(flight, flight.verdict_asked_for())
            return
        self._flights[flight.future] = flight
        flight.task = asyncio.create_task(self._drive(flight))
        flight.task.add_done_callback(lambda _: self._landed(flight))

    def _landed(self, flight: Flight) -> None:
        self._flights.pop(flight.future, None)
        if not flight.future._done.done():  # cancelled before its first step: the coroutine never ran
            if flight.adopted is not None:
                self.events.adopt(flight.progress.session_id, flight.request.ledger)
                adopted = flight.adopted
                flight.last_stop = self.stop_silent(flight.progress.session_id, adopted.bucket, adopted.key)
            self._resolve(flight, flight.verdict_asked_for())

    def _force(self, future: RolloutFuture, verdict: Verdict) -> None:
        flight = self._flights.get(future)
        if flight is None or flight.forced is not None or flight.task is None:
            return
        flight.forced = verdict
        flight.task.cancel()

    def _notified(self, session_id: str) -> None:
        flight = self._sessions.get(session_id)
        if flight is None:
            return
        flight.notified = True  # it may come before anyone waits
        if flight.waiting is not None:
            watcher, waiter = flight.waiting
            watcher.pushed(waiter)

    async def _drive(self, flight: Flight) -> None:
        request, progress = flight.request, flight.progress
        try:
            while True:
                verdict = await self._attempt(flight)
                tried = progress.attempt - request.first_attempt
                # The earlier process died before it could send this, or nothing came of it: gone first, then again.
                unsent = flight.adopted is not None and not flight.adopted.accepted and verdict.outcome is Outcome.LOST
                if not unsent and (tried >= request.retries or verdict.outcome not in request.retry_on):
                    break
                self.events.retried(progress, verdict)
                if flight.last_stop is None:
                    self.events.never_started(progress.session_id)
                elif unsent:
                    await asyncio.wait([flight.last_stop])
                progress.attempt += 1
                progress.session_id = new_session_id()
                progress.entered_s.clear()
                flight.adopted = None
        except asyncio.CancelledError:
            verdict = flight.verdict_asked_for()
        except Exception as e:
            logger.exception("rollout failed inside the client", extra={"session_id": progress.session_id})
            verdict = Verdict(outcome=Outcome.LOST, error=e)
        self._resolve(flight, verdict)

    def _resolve(self, flight: Flight, verdict: Verdict) -> None:
        progress = flight.progress
        if isinstance(verdict.error, AgentCoreRLError):
            verdict.error.session_id = verdict.error.session_id or progress.session_id
            verdict.error.input_id = verdict.error.input_id or progress.input_id
            verdict.error.key = verdict.error.key or progress.key or None
        verdict = flight.future._claim(verdict)  # its owner may have cancelled it meanwhile
        self.events.finished(flight.request, progress, verdict)
        if flight.last_stop is None:
            self.events.never_started(progress.session_id)
        flight.future._resolve()

    async def _attempt(self, flight: Flight) -> Verdict:
        """One session from its place in the queue to its verdict."""
        session_id = flight.progress.session_id
        flight.invoke, flight.waiting, flight.notified, flight.last_stop = None, None, False, None
        flight.server_errors, flight.server_error = 0, None
        self._sessions[session_id] = flight
        stop, recorded = flight.adopted is not None, False
        try:
            verdict = await self._run_session(flight)
            recorded = True  # then its agent removes the heartbeat itself
            return verdict
        except AttemptEnded as e:
            error = e.verdict.error
            if error is not None and error.__cause__ is None and e.__cause__ is not error:
                error.__cause__ = e.__cause__  # what boto3 or the store said stays visible
            return e.verdict
        finally:
            self._sessions.pop(session_id, None)
            call = flight.take_invoke()
            if call is not None or stop:
                progress = flight.progress
                if recorded or not progress.key:
                    flight.last_stop = self.stops().put(session_id, after=call)
                else:
                    flight.last_stop = self.stop_silent(session_id, progress.bucket, progress.key, after=call)

    async def _run_session(self, flight: Flight) -> Verdict:
        request, progress = flight.request, flight.progress
        config = dict(request.config)
        if request.prepare is not None:
            extra = request.prepare(progress.session_id, progress.attempt)
            config.update(await extra if inspect.isawaitable(extra) else extra)
        if self._listener is not None:
            await self._listener.start()
        adopted, ledger = flight.adopted, request.ledger
        key = self.proofs.key(ledger)
        progress.proof_key = key.id if adopted is None else adopted.proof_key
        progress.promised = adopted is not None and adopted.promised
        config[PROOF_KEY_FIELD] = key.session_secret(progress.session_id)
        body, bucket, expected = self._encode(flight, config)
        progress.bucket, progress.key = bucket, expected
        progress.root = expected.removesuffix(f"{request.input_id}/{progress.session_id}.json")
        if flight.adopted is not None:
            progress.bucket, progress.key = flight.adopted.bucket, flight.adopted.key
            progress.enter(Stage.START)
            self.events.adopt(progress.session_id, request.ledger)
            flight.accept()
        else:
            await self.events.intent(request, progress)
        while True:
            reply: dict[str, Any] | None = None
            if flight.adopted is None:
                reply = await self._invoker.start(flight, body)
            if reply is not None:
                progress.bucket, progress.key = place_of_record(reply, bucket)
                progress.agent_reply = reply
                progress.promised = promises_proof(reply)
                self.events.accepted(progress)
            flight.expected = self.proofs.expected(
                progress.session_id, ledger, key_id=progress.proof_key, promised=progress.promised
            )
            if reply is not None or flight.server_error is None:
                flight.accept()
            progress.enter(Stage.RUN)
            try:
                async with asyncio.timeout_at(attempt_limit(flight)):
                    return await self._follower.follow(flight, reply)
            except TimeoutError as e:
                raise timed_out(flight, flight.progress.stage) from e
            except NoSignError as e:
                if not await self._invoker.may_start_again(flight):
                    raise AttemptEnded(Outcome.LOST, RolloutLostError(str(e))) from flight.server_error

    def _encode(self, flight: Flight, config: dict[str, Any]) -> tuple[bytes, str, str]:
        request, progress = flight.request, flight.progress
        config.setdefault("attempt", progress.attempt)
        config.setdefault("heartbeat_s", self._watch.heartbeat_s)
        notify_url = self._notify_url or (self._listener.url_for(progress.session_id) if self._listener else "")
        if notify_url:
            config.setdefault("notify_url", notify_url)
        try:
            body = json.dumps({**request.payload, ROLLOUT_FIELD: config}).encode()
            key = result_key(config["exp_id"], config["input_id"], progress.session_id)
        except (TypeError, ValueError) as e:
            raise AttemptEnded(Outcome.INVALID, ConfigError(f"the payload cannot be sent: {e}")) from e
        return body, str(config["s3_bucket"]), key
