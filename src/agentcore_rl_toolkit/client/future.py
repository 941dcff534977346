"""The handle on one rollout, and its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._portal import Portal, result_of
from ..contract import Cause, IdValue, Outcome, Stage
from ..errors import AgentCoreRLError, RolloutCancelledError, RolloutTimeoutError
from .records import Verdict
from .settings import Deadlines
from .watcher import Watcher

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class RolloutFuture:
    """The result of one rollout, now or later. Thread-safe. Sync and async use may be mixed.

    ``result()`` returns the record that the agent stored, also when the agent failed (``ok`` is False then), unless the client
    has ``on_failure="raise"``. If there is no record, it raises the reason. The session is stopped in the background.

    Attributes:
        session_id: the session of the current attempt.
        input_id: the input's id, as the caller wrote it.
        attempt: 1 for the first session, one more for each retry.
        s3_bucket, result_key: the store of the record, and its key there.
        stage: the stage that the rollout is in, or ended in.
    """

    session_id: str
    input_id: IdValue
    deadlines: Deadlines
    attempt: int = 1
    s3_bucket: str = ""
    result_key: str = ""
    stage: Stage = Stage.QUEUE
    timeout_s: float | None = None
    sent_s: float = 0.0  # time of the last invoke
    raise_failures: bool = False
    _portal: Portal
    _created_s: float = field(default_factory=time.monotonic)
    _entered_s: float = field(default_factory=time.monotonic)
    _spent_s: dict[Stage, float] = field(default_factory=dict)
    _ended_s: float | None = None
    _task: asyncio.Task[Verdict] | None = None  # the life of the rollout
    _watcher: Watcher | None = None
    _verdict: Verdict | None = None  # the first one; `_done` follows on the client's thread
    _verdict_lock: Any = field(
        default_factory=threading.RLock
    )  # a garbage collector may end a batch inside any statement
    _done: concurrent.futures.Future[Verdict] = field(default_factory=concurrent.futures.Future)
    _accepted: concurrent.futures.Future[bool] = field(
        default_factory=concurrent.futures.Future
    )  # False: it ended before

    # ---- state

    @property
    def stages(self) -> Mapping[str, float]:
        """Seconds spent in each stage of the last attempt so far."""
        end_s = time.monotonic() if self._ended_s is None else self._ended_s
        spent_s = {**self._spent_s, self.stage: self._spent_s.get(self.stage, 0.0) + end_s - self._entered_s}
        return {stage.value: seconds for stage, seconds in spent_s.items()}

    @property
    def trouble(self) -> Exception | None:
        """The reason why the record cannot be looked for at present, or None."""
        return None if self._watcher is None else self._watcher.trouble

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the rollout, or None while it runs."""
        return None if self._verdict is None else self._verdict.outcome

    @property
    def ok(self) -> bool:
        """True when the rollout ended `ok`. False while it runs, and for an agent that failed."""
        return self.outcome is Outcome.OK

    @property
    def cause(self) -> Cause | None:
        """The cause of the rollout's failure, or None while it runs, and if it did not fail."""
        return None if self._verdict is None else self._verdict.cause

    @property
    def record(self) -> dict[str, Any] | None:
        """The stored record, of a failed agent too, or None while the rollout runs, or if there is none."""
        return None if self._verdict is None else self._verdict.record

    @property
    def cancelled(self) -> bool:
        """True when the rollout was cancelled."""
        return self.outcome is Outcome.CANCELLED

    def elapsed(self) -> float:
        """Return seconds from the call that made this future to its end, or to now."""
        return (time.monotonic() if self._ended_s is None else self._ended_s) - self._created_s

    def done(self) -> bool:
        """Return True once `result` would return at once. This sends no request."""
        return self._verdict is not None

    async def done_async(self) -> bool:
        """Run `done` without blocking."""
        return self.done()

    def ready_to_poll(self) -> bool:
        """Return True: results are watched in the background."""
        return True

    def time_until_next_poll(self) -> float:
        """Return 0.0: results are watched in the background."""
        return 0.0

    # ---- results

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the record and return it.

        Args:
            timeout: seconds. None waits to the end (each stage has its deadline), 0 only checks. When a positive timeout
                passes, the rollout ends with the outcome `timeout`, and its session is stopped. `wait` does not end it.
        Raises: RolloutTimeoutError (a TimeoutError), RolloutLostError, RolloutThrottledError, RolloutCancelledError,
            InvalidResultError; AgentError with ``on_failure="raise"``.
        """
        if self._verdict is not None:
            return self._open(self._verdict)
        return self._portal.call(self.result_async(timeout))

    async def result_async(self, timeout: float | None = None) -> dict[str, Any]:
        """Run `result` without blocking. Cancelling the awaiting task does not cancel the rollout."""
        if self._verdict is not None:
            return self._open(self._verdict)
        if timeout is not None and timeout <= 0:
            raise self._still_running(timeout)
        ended = asyncio.wrap_future(self._done)
        await asyncio.wait([ended], timeout=timeout)
        if not ended.done():
            error = self._still_running(timeout, "; its session is being stopped")
            self._end(Verdict(error=error))
            await asyncio.wait([ended])
        return self._open(ended.result())

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return self.result_async().__await__()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the rollout. Returns False when `timeout` seconds pass first. The rollout continues then."""
        if self._verdict is not None:
            return True
        self._portal.refuse_own_thread()
        _ = self._portal.loop  # raises in a forked child, where the wait would not end
        try:
            result_of(self._done, timeout)
        except concurrent.futures.TimeoutError:
            return False
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the rollout's failure as an exception, or None when it ended `ok`.

        Raises: RolloutTimeoutError when it is not over within `timeout` seconds; the rollout continues then.
        """
        if not self.wait(timeout):
            raise self._still_running(timeout)
        return None if self._verdict is None else self._verdict.error

    def add_done_callback(self, callback: Callable[[RolloutFuture], object]) -> None:
        """Call `callback(future)` when the rollout ends, on the client's thread (at once if it is over). Keep it short."""

        def call(_: object) -> None:
            try:
                callback(self)
            except BaseException:  # even a SystemExit must not keep other callbacks from their call
                logger.exception("a done callback of a rollout raised")

        self._done.add_done_callback(call)

    def cancel(self) -> bool:
        """End the rollout and stop its session in the background. Returns True for the call that ended it.

        When this returns, the future is done.
        """
        return self._end(Verdict(error=RolloutCancelledError("the rollout was cancelled")))

    async def cancel_async(self) -> bool:
        """Run `cancel` without blocking. It returns when the rollout is over."""
        cancelled = self.cancel()
        await asyncio.wait([asyncio.wrap_future(self._done)])
        return cancelled

    # ---- inside

    def _end(self, verdict: Verdict) -> bool:
        """End the rollout with this verdict. Returns False if it has one."""
        if self._claim(verdict) is not verdict:
            return False
        self._portal.post(lambda: self._task and self._task.cancel())  # without a task, `start` cancels it
        return True

    def _claim(self, verdict: Verdict) -> Verdict:
        """Set the verdict unless there is one. Return the verdict that counts."""
        error = verdict.error
        if isinstance(error, AgentCoreRLError):
            error.session_id = error.session_id or self.session_id
            error.input_id = self.input_id if error.input_id is None else error.input_id
            error.key = error.key or self.result_key or None
        with self._verdict_lock:
            if self._verdict is None:
                self._ended_s, self._verdict = time.monotonic(), verdict
            return self._verdict

    def _accept(self, accepted: bool = True) -> None:
        """Report that the runtime accepted the invoke, or may have."""
        if not self._accepted.done():
            self._accepted.set_result(accepted)

    def _enter(self, stage: Stage) -> None:
        now_s = time.monotonic()
        self._spent_s[self.stage] = self._spent_s.get(self.stage, 0.0) + now_s - self._entered_s
        self.stage, self._entered_s = stage, now_s

    @property
    def _limit_s(self) -> float | None:
        return getattr(self.deadlines, f"{self.stage.value}_s", None)  # the queue has none

    def _timed_out(self) -> RolloutTimeoutError:
        """Return the error of a deadline that passed in the current stage."""
        stage, trouble, timeout_s = self.stage.value, self.trouble, self.timeout_s
        called_s = time.monotonic() - self.sent_s + 0.001  # a timer may be early by its resolution
        over = timeout_s is not None and called_s >= timeout_s
        text = f"Timeout after {timeout_s:g}s" if over else f"deadline {stage}_s={self._limit_s} passed"
        why = "" if trouble is None else f"; the store could not be searched for its record: {trouble}"
        return RolloutTimeoutError(f"{text} (stage: {stage}, {self.stages[stage]:.1f} s in it){why}", stage=stage)

    def described(self) -> dict[str, Any]:
        """Describe the state for `RolloutClient.flights`. Units: seconds."""
        stage_s, limit_s, trouble = time.monotonic() - self._entered_s, self._limit_s, self.trouble
        left = [] if limit_s is None else [limit_s - stage_s]
        if self.timeout_s is not None and self.stage in (Stage.START, Stage.RUN):
            left.append(self.timeout_s - (time.monotonic() - self.sent_s))
        return {
            "session_id": self.session_id,
            "input_id": self.input_id,
            "attempt": self.attempt,
            "stage": self.stage.value,
            "stage_s": stage_s,
            "total_s": sum(self.stages.values()),
            "left_s": min(left, default=None),  # seconds until the first deadline
            "trouble": None if trouble is None else str(trouble),
        }

    def _still_running(self, timeout: float | None, consequence: str = "") -> RolloutTimeoutError:
        return RolloutTimeoutError(
            f"the rollout is not over after {timeout} s (stage: {self.stage.value}){consequence}",
            stage=self.stage.value,
            session_id=self.session_id,
            input_id=self.input_id,
        )

    def _open(self, verdict: Verdict) -> dict[str, Any]:
        if verdict.error is not None and (verdict.record is None or self.raise_failures):
            raise verdict.error
        return verdict.record or {}

    def __repr__(self) -> str:
        state = self.outcome.value if self.outcome else self.stage.value
        return f"<RolloutFuture {state} input_id={self.input_id!r} session_id={self.session_id!r}>"


def as_completed(futures: Iterable[RolloutFuture], timeout: float | None = None) -> Iterator[RolloutFuture]:
    """Yield rollouts in the order in which they end. None of them is cancelled.

    Raises: TimeoutError when some are not over `timeout` seconds after the call.
    """
    end_s = None if timeout is None else time.monotonic() + timeout
    waiting = sorted(dict.fromkeys(futures), key=lambda f: math.inf if f._ended_s is None else f._ended_s)
    ended: list[concurrent.futures.Future[RolloutFuture]] = [concurrent.futures.Future() for _ in waiting]
    places = deque(ended)
    for future in waiting:
        _ = future.done() or future._portal.loop  # as in `wait`
        future.add_done_callback(lambda done: places.popleft().set_result(done))
    for number, place in enumerate(ended):
        try:
            done = result_of(place, None if end_s is None else end_s - time.monotonic())
        except TimeoutError:
            left = len(waiting) - number
            raise TimeoutError(f"{left} of {len(waiting)} rollouts are not over after {timeout} s") from None
        yield done
