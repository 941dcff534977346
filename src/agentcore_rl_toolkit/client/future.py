"""The handle on one rollout, and its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._portal import Portal, result_of
from ..contract import Cause, IdValue, Outcome, Stage, cause_of, record_failure
from ..errors import RolloutCancelledError, RolloutTimeoutError
from ..proof import Proof


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a rollout ended: an outcome, with the record if there is one and the error if it did not end `ok`."""

    outcome: Outcome
    record: dict[str, Any] | None = None
    error: BaseException | None = None
    proof: Proof | None = None  # of the record, where one was read

    @property
    def cause(self) -> Cause | None:
        """The cause of the failure; None where there is none."""
        return cause_of(self.outcome, self.record, self.error)

    @property
    def failure(self) -> str | None:
        """What the policy failed at, where it is the cause: a key of `errors.POLICY_FAILURES`."""
        return None if self.record is None else record_failure(self.record, self.outcome)


@dataclass(slots=True)
class Progress:
    """Where a rollout is. Written on the client's loop only; read from anywhere.

    ``entered_s``: monotonic time at which the stage began. ``spent_s``: seconds in the stages of the attempt before that.
    ``finished_s``: when the rollout was resolved.
    """

    session_id: str
    input_id: IdValue
    attempt: int = 1
    bucket: str = ""
    key: str = ""
    root: str = ""  # prefix of the experiment in the store
    stage: Stage = Stage.QUEUE
    entered_s: float = field(default_factory=time.monotonic)
    spent_s: dict[Stage, float] = field(default_factory=dict)
    finished_s: float | None = None
    agent_reply: dict[str, Any] | None = None
    proof_key: str | None = None  # name of the key that the session's secret comes from
    promised: bool = False  # its agent said that it proves its record
    trouble: Callable[[], Exception | None] = lambda: None  # why its record cannot be looked for at present

    def enter(self, stage: Stage) -> None:
        """Begin a stage."""
        now_s = time.monotonic()
        self.spent_s[self.stage] = self.spent_s.get(self.stage, 0.0) + now_s - self.entered_s
        self.stage, self.entered_s = stage, now_s

    def restart(self, session_id: str) -> None:
        """Begin the next attempt."""
        self.session_id, self.attempt = session_id, self.attempt + 1
        self.stage, self.entered_s, self.spent_s = Stage.QUEUE, time.monotonic(), {}

    def stages(self) -> dict[str, float]:
        """Seconds spent in each stage of the last attempt, by name, the current one up to now."""
        end_s = self.finished_s if self.finished_s is not None else time.monotonic()
        spent_s = {**self.spent_s, self.stage: self.spent_s.get(self.stage, 0.0) + end_s - self.entered_s}
        return {stage.value: seconds for stage, seconds in spent_s.items()}


class RolloutFuture:
    """The result of one rollout, now or later. Thread-safe; sync and async use may be mixed.

    ``result()`` returns the record that the agent stored, also when the agent failed (``status_code`` is not 200),
    unless the rollout was made with ``on_failure="raise"``. Where there is no record to return (lost, timeout,
    throttled, cancelled, unreadable) a `RolloutError` says why. Session and future end together: the session is stopped
    in the background as soon as the record is read.
    """

    def __init__(
        self, portal: Portal, progress: Progress, end: Callable[[Verdict], object], *, raise_failures: bool
    ) -> None:
        self._portal = portal
        self._progress = progress
        self._end = end  # on the client's thread: ends the rollout with a verdict
        self._raise_failures = raise_failures
        self._created_s = time.monotonic()
        self._verdict: Verdict | None = None  # the first one there was; `_done` follows on the client's thread
        self._verdict_lock = threading.Lock()
        self._done: concurrent.futures.Future[Verdict] = concurrent.futures.Future()
        self._accepted: concurrent.futures.Future[None] = concurrent.futures.Future()

    # ---- identity and state

    @property
    def session_id(self) -> str:
        """The session of the current attempt."""
        return self._progress.session_id

    @property
    def input_id(self) -> IdValue:
        return self._progress.input_id

    @property
    def attempt(self) -> int:
        """1 for the first session, one more for each retry."""
        return self._progress.attempt

    @property
    def s3_bucket(self) -> str:
        return self._progress.bucket

    @property
    def result_key(self) -> str:
        """Key of the record in the store."""
        return self._progress.key

    @property
    def stage(self) -> Stage:
        """The stage that the rollout is in, or ended in."""
        return self._progress.stage

    @property
    def stages(self) -> Mapping[str, float]:
        """Seconds spent in each stage so far."""
        return self._progress.stages()

    @property
    def trouble(self) -> Exception | None:
        """Why the store cannot be asked for its record at present; None where it can."""
        return self._progress.trouble()

    @property
    def outcome(self) -> Outcome | None:
        """How the rollout ended; None while it runs."""
        return None if self._verdict is None else self._verdict.outcome

    @property
    def cause(self) -> Cause | None:
        """The cause of the rollout's failure; None while it runs, and where it did not fail."""
        return None if self._verdict is None else self._verdict.cause

    @property
    def record(self) -> dict[str, Any] | None:
        """The stored record, whatever it says; None while running or when there is none."""
        return None if self._verdict is None else self._verdict.record

    @property
    def cancelled(self) -> bool:
        return self.outcome is Outcome.CANCELLED

    def elapsed(self) -> float:
        """Seconds from the call that made this future to its end, or to now."""
        end_s = self._progress.finished_s
        return (end_s if end_s is not None else time.monotonic()) - self._created_s

    def done(self) -> bool:
        """True once `result` would answer at once. No request is made."""
        return self._verdict is not None

    async def done_async(self) -> bool:
        return self.done()

    def ready_to_poll(self) -> bool:
        """Always True: results are watched in the background and asking costs nothing."""
        return True

    def time_until_next_poll(self) -> float:
        """Always 0.0; see `ready_to_poll`."""
        return 0.0

    # ---- results

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The record. Blocks.

        Args:
            timeout: seconds; None waits to the end (each stage has its own deadline), 0 only looks and leaves the
                rollout alone. When a positive timeout passes, the rollout ends there: its session is stopped and its
                outcome is `timeout`.
        Raises: RolloutTimeoutError (a TimeoutError), RolloutLostError, RolloutThrottledError, RolloutCancelledError,
            InvalidResultError; AgentError with ``on_failure="raise"``.
        """
        if self._verdict is not None:
            return self._open(self._verdict)
        return self._portal.call(self.result_async(timeout))

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        """Async `result`. Cancelling the awaiting task does not cancel the rollout."""
        return self._open(await self._wait_async(timeout))

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result_async().__await__()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The rollout's failure as an exception; None when it ended `ok`. Never raises for the rollout itself.

        Raises: RolloutTimeoutError when it is not over within `timeout`; the rollout is left alone then.
        """
        if self._verdict is not None:
            return self._verdict.error
        self._portal.refuse_own_thread()
        try:
            return result_of(self._done, timeout).error
        except concurrent.futures.TimeoutError:
            raise self._still_running(timeout) from None

    def add_done_callback(self, callback: Callable[[RolloutFuture], object]) -> None:
        """Call `callback(future)` when the rollout ends, on the client's thread (at once if it is over). Keep it short."""
        self._done.add_done_callback(lambda _: callback(self))

    # ---- ending it

    def cancel(self) -> bool:
        """End the rollout and stop its session in the background. True for the call that ended it, False afterwards.

        When this returns, the future is done.
        """
        error = RolloutCancelledError(
            "the rollout was cancelled", session_id=self.session_id, input_id=self.input_id, key=self.result_key or None
        )
        verdict = Verdict(outcome=Outcome.CANCELLED, error=error)
        if self._claim(verdict) is not verdict:
            return False
        self._portal.post(self._end, verdict)
        return True

    async def cancel_async(self) -> bool:
        """Async `cancel`; returns when the rollout is over."""
        cancelled = self.cancel()
        await asyncio.shield(asyncio.wrap_future(self._done))
        return cancelled

    # ---- inside

    async def _wait_async(self, timeout: float | None) -> Verdict:
        if self._verdict is not None:
            return self._verdict
        if timeout is not None and timeout <= 0:
            raise self._still_running(timeout)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._done)), timeout)
        except TimeoutError:
            self._expire(timeout or 0.0)
            await asyncio.shield(asyncio.wrap_future(self._done))
        return self._done.result()

    def _expire(self, timeout_s: float) -> None:
        error = self._still_running(timeout_s, "; its session is being stopped")
        self._portal.post(self._end, Verdict(outcome=Outcome.TIMEOUT, error=error))

    def _still_running(self, timeout: float | None, what_follows: str = "") -> RolloutTimeoutError:
        return RolloutTimeoutError(
            f"the rollout is not over after {timeout} s (stage: {self.stage.value}){what_follows}",
            stage=self.stage.value,
            session_id=self.session_id,
            input_id=self.input_id,
        )

    def _open(self, verdict: Verdict) -> dict[str, Any]:
        if verdict.record is not None and (verdict.error is None or not self._raise_failures):
            return verdict.record
        if verdict.error is None:
            raise RolloutCancelledError(
                f"the rollout ended as {verdict.outcome} without a record", session_id=self.session_id
            )
        raise verdict.error

    def _claim(self, verdict: Verdict) -> Verdict:
        """Make this the verdict unless there is one. Returns the one that stands."""
        with self._verdict_lock:
            if self._verdict is None:
                self._progress.finished_s = time.monotonic()
                self._verdict = verdict
            return self._verdict

    def _resolve(self) -> None:
        """Hand out the verdict that stands. On the client's thread, once all that follows from it is on record."""
        assert self._verdict is not None
        if not self._accepted.done():
            self._accepted.set_result(None)
        if not self._done.done():
            self._done.set_result(self._verdict)

    def __repr__(self) -> str:
        state = self.outcome.value if self.outcome else self.stage.value
        return f"<RolloutFuture {state} input_id={self.input_id!r} session_id={self.session_id!r}>"
