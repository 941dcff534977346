"""Batches: many rollouts, a bounded number at a time, results as they come."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..contract import Cause, IdValue, Outcome
from ..errors import AgentCoreRLError, ConfigError, RolloutError, text_of
from ..proof import Proof
from .ledger import Attempt, FileLedger, attempts_of, fingerprint
from .rollout import Dispatcher, Rollout
from .transport import STORE_REFUSED

logger = logging.getLogger(__name__)

LINE_CHARS = 1_000  # length of an error's line, because some agents put a page of text into an exception
# If these are the first results of a batch, the ARN, the bucket, the region or the credentials are wrong for every rollout.
WRONG_BUCKET = frozenset({"NoSuchBucket", "PermanentRedirect", "AuthorizationHeaderMalformed"})
# These count only until the runtime has accepted a rollout of the batch.
WRONG_SETTINGS = frozenset(
    {
        *("ResourceNotFoundException", "AccessDeniedException", "UnrecognizedClientException", "NoCredentialsError"),
        *("InvalidSignatureException", "InvalidClientTokenId", "EndpointConnectionError", STORE_REFUSED),
    }
)
ProgressHook = Callable[["BatchProgress"], object]
Resume = bool | Literal["retry_failed"]


@dataclass
class BatchItem:
    """A finished rollout of a batch.

    ``success`` is True only for the outcome `ok`: a crashed agent is not a success, though ``result`` holds its record.

    Attributes:
        result: the stored record, if there is one.
        error: the failure in one line.
        cause: of the failure: the agent, the policy or the infrastructure; None if it did not fail.
        failure: the policy's failure, if the policy is the cause: tokens, turns, context, calls, answer or other.
        traceback: the agent's own traceback if it stored one, otherwise ours if something was raised.
        index: position of the payload in the batch.
        elapsed: seconds from the moment the rollout left the batch's queue.
        stages: seconds spent in each stage.
        proof: what the record proves of its origin; None without a record.
    """

    success: bool
    result: dict[str, Any] | None = None
    error: str | None = None
    index: int | None = None
    elapsed: float | None = None
    exception: BaseException | None = None
    outcome: Outcome | None = None
    input_id: IdValue | None = None
    session_id: str | None = None
    attempt: int = 1
    stages: Mapping[str, float] = field(default_factory=dict)
    proof: Proof | None = None
    traceback: str | None = None
    cause: Cause | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """The progress of a batch. ``total`` is None for an iterable without a length. Units: ``elapsed_s`` seconds.

    Attributes:
        outcomes, causes: rollouts by outcome, and failures by cause.
    """

    total: int | None
    done: int
    ok: int
    running: int
    elapsed_s: float
    outcomes: Mapping[str, int]
    causes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        failed = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.items()) if name != "ok")
        text = f"{self.done}{'' if self.total is None else f'/{self.total}'} done, {self.ok} ok"
        text += f", {failed}" if failed else ""
        text += f" ({self.causes[Cause.POLICY]} the policy's)" if self.causes.get(Cause.POLICY) else ""
        return f"{text}, {self.running} running, {self.elapsed_s:.0f} s"


def error_line(error: BaseException) -> str:
    """Return an error in one line of at most `LINE_CHARS`, with the class that the agent raised."""
    kind = getattr(error, "error_type", None) if isinstance(error, AgentCoreRLError) else type(error).__name__
    text = text_of(error)
    text = text if kind is None or kind in text else f"{kind}: {text}"
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip()) or type(error).__name__
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 3]}..."


def _traceback_of(error: BaseException) -> str | None:
    if isinstance(error, RolloutError) and error.agent_traceback:
        return error.agent_traceback
    raised = error.__traceback__ is not None or error.__cause__ is not None
    return "".join(traceback.format_exception(error)) if raised else None


def item_of(rollout: Rollout) -> BatchItem:
    """Return the batch item of a finished rollout."""
    verdict = rollout._done.result()
    return BatchItem(
        success=verdict.outcome is Outcome.OK,
        result=verdict.record,
        error=None if verdict.error is None else error_line(verdict.error),
        exception=verdict.error,
        outcome=verdict.outcome,
        proof=verdict.proof,
        traceback=None if verdict.error is None else _traceback_of(verdict.error),
        cause=verdict.cause,
        failure=verdict.failure,
        index=rollout.index,
        elapsed=rollout.elapsed(),
        input_id=rollout.input_id,
        session_id=rollout.session_id,
        attempt=rollout.attempt,
        stages=rollout.stages,
    )


class BatchResult:
    """The items of a batch in the order in which they finish. Iterate it once, with `for` or `async for`, or use `next`.

    The iteration starts the batch. Leaving it early stops every session that it started: on `break`, on an exception, on Ctrl-C,
    or on `close()`. At most twice `limit` items are held: the rollouts in flight, and finished items that wait for the caller.
    """

    def __init__(self, run: Run, owner: object) -> None:
        self._run, self._portal = run, run.dispatcher.portal
        self._owner = owner  # the client lives as long as its batch
        self._iterated = self._over = False

    def __iter__(self) -> _Iteration:
        if self._iterated:
            raise ConfigError("a batch runs once, and this one was iterated before; keep its items in a list")
        self._iterated = True
        if not self._over:
            self._portal.loop.call_soon_threadsafe(self._run.start)
        return _Iteration(self)

    __aiter__ = __iter__

    def __next__(self) -> BatchItem:
        try:
            return self._opened(None if self._over else self._portal.call(self._run.next_item()), StopIteration())
        except BaseException:  # also Ctrl-C, whose traceback may keep this batch alive
            self.close()
            raise

    async def __anext__(self) -> BatchItem:
        try:
            item = None if self._over else await self._portal.run(self._run.next_item())
            return self._opened(item, StopAsyncIteration())
        except BaseException:
            self.close()
            raise

    def _opened(self, item: BatchItem | BaseException | None, end: Exception) -> BatchItem:
        """Return an item. Raises: the error that ended the batch, or ``end``."""
        if isinstance(item, BatchItem):
            return item
        raise end if item is None else item

    def close(self) -> None:
        """Stop what this batch started and has not finished. Returns at once. Sessions are stopped in the background."""
        self._over = True
        self._portal.post(self._run.cancel)

    def __del__(self) -> None:
        if not self._over:
            self.close()


class _Iteration:
    """A loop over a batch. `break` drops it, although the caller may keep the batch, and so ends the batch at once."""

    def __init__(self, batch: BatchResult) -> None:
        self._batch = batch

    def __iter__(self) -> _Iteration:
        return self

    __aiter__ = __iter__

    def __next__(self) -> BatchItem:
        return next(self._batch)

    async def __anext__(self) -> BatchItem:
        return await anext(self._batch)

    def close(self) -> None:
        self._batch.close()

    __del__ = close


AsyncBatchResult = BatchResult  # the published client's name of the result of `run_batch_async`


@dataclass(eq=False)
class Run:
    """The rollouts of a batch: starts them while there is room, and queues their items. Lives on the client's loop.

    It does not know its `BatchResult`, which may be dropped while this runs.
    """

    dispatcher: Dispatcher
    rollouts: AsyncIterator[Rollout]
    total: int | None
    limit: int
    hook: ProgressHook | None
    log_interval_s: float

    def __post_init__(self) -> None:
        self._finished: asyncio.Queue[BatchItem | BaseException | None] = asyncio.Queue()
        self._room, self._slots = asyncio.Semaphore(2 * self.limit), asyncio.Semaphore(self.limit)
        self._live: set[Rollout] = set()
        self._task: asyncio.Task[None] | None = None
        self._outcomes: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._records = 0  # that were read
        self._wrong: AgentCoreRLError | None = None  # an error that every rollout would meet
        self._began_s = self._logged_s = time.monotonic()

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._feed())

    async def _feed(self) -> None:
        """Start the rollouts, and wait for them. The last item is an error, or None for the end."""
        try:
            while True:
                await self._room.acquire()
                await self._slots.acquire()
                rollout = await anext(self.rollouts, None)
                if rollout is None:
                    break
                self._check_settings()
                self.dispatcher.submit(rollout)
                self._live.add(rollout)
                rollout.add_done_callback(functools.partial(self._ended, rollout))
            while self._live:
                self._check_settings()
                await self._slots.acquire()
        except BaseException as e:  # also what the caller's iterable raises, such as SystemExit
            self._finished.put_nowait(e)
        finally:
            self.cancel()

    async def next_item(self) -> BatchItem | BaseException | None:
        """Return the next finished item, or the error that ended the batch, for the caller to raise, or None at the end."""
        self.start()
        item = await self._finished.get()
        self._room.release()
        return item

    def cancel(self) -> None:
        """End the rollouts in flight, and the batch."""
        if self._task is not None:
            self._task.cancel()
        for rollout in list(self._live):
            rollout.cancel()
        self._finished.put_nowait(None)

    def _check_settings(self) -> None:
        """Stop the batch when every rollout would fail like the first ones. Raises: ConfigError."""
        if self._wrong is not None and not self._records:
            text = f"the batch ends, because every rollout would fail like its first ones: {self._wrong}"
            raise ConfigError(text, code=self._wrong.code) from self._wrong.__cause__ or self._wrong

    def _ended(self, rollout: Rollout, _: object) -> None:
        self._live.discard(rollout)
        try:
            item = item_of(rollout)
            error = item.exception
            wrong = WRONG_BUCKET if self.dispatcher.accepted_s > self._began_s else WRONG_BUCKET | WRONG_SETTINGS
            if isinstance(error, AgentCoreRLError) and error.code in wrong:
                self._wrong = self._wrong or error
            self._outcomes[str(item.outcome)] += 1
            self._records += item.result is not None
            self._causes.update([str(item.cause)] if item.cause is not None else ())
            self._finished.put_nowait(item)
            self._report()
        finally:
            self._slots.release()

    def _report(self) -> None:
        now_s = time.monotonic()
        due = self.log_interval_s > 0 and now_s - self._logged_s >= self.log_interval_s
        if self.hook is None and not due:
            return
        progress = BatchProgress(
            total=self.total,
            done=self._outcomes.total(),
            ok=self._outcomes[str(Outcome.OK)],
            running=len(self._live),
            elapsed_s=now_s - self._began_s,
            outcomes=dict(self._outcomes),
            causes=dict(self._causes),
        )
        if due:
            self._logged_s = now_s
            logger.info("batch: %s", progress)
        try:
            if self.hook is not None:
                self.hook(progress)
        except Exception:
            logger.exception("the progress hook of a batch raised")


# ---- resume


def open_ledger(
    dispatcher: Dispatcher, ledger: FileLedger, resume: Resume, total: int | None
) -> dict[int | None, Attempt]:
    """Open a ledger, and stop the sessions in it that no row waits for. Returns the last attempt of each row.

    Without `resume` the ledger is only written.
    """
    lines = ledger.open()
    attempts = attempts_of(lines) if resume else {}
    last = {attempt.index: attempt for attempt in attempts.values()}
    for attempt in attempts.values():
        there = total is None or (attempt.index or 0) < total
        row_waits = there and attempt.outcome is None and attempt is last[attempt.index]
        if not attempt.stopped and not row_waits:
            dispatcher.stops.start(attempt.session_id, ledger)
    return last


def continue_from(known: Attempt, rollout: Rollout, resume: Resume, *, fixed_input: bool) -> None:
    """Continue a row from its last attempt in the ledger: wait for its session, read its record, or run it again.

    Raises: ConfigError when the row is another one.
    """
    if fingerprint(rollout.payload) != known.payload:
        raise ConfigError(
            f"row {rollout.index} is not the one in the ledger (its payload differs); resume with the same rows in the same "
            "order, or use another exp_id or ledger"
        )
    if fixed_input and str(rollout.input_id) != str(known.input_id):
        raise ConfigError(f"row {rollout.index} has input id {rollout.input_id!r}, the ledger {known.input_id!r}")
    rollout.input_id = known.input_id
    rollout.config = {**rollout.config, "input_id": known.input_id}
    # A failure of the policy is a result, and a retry would be a second draw. An interrupted batch cancels its rollouts.
    failed = known.outcome not in (None, Outcome.OK) and known.cause != Cause.POLICY
    if known.outcome == Outcome.CANCELLED or known.retried or (resume == "retry_failed" and failed):
        rollout.attempt = known.attempt + 1
        return
    rollout.known, rollout.session_id, rollout.attempt = known, known.session_id, known.attempt


def print_progress(progress: BatchProgress) -> None:
    """Print progress as one line on stderr, rewritten in place on a terminal."""
    end = "\n" if progress.done == progress.total or not sys.stderr.isatty() else "\r"
    print(f"{progress}", end=end, file=sys.stderr, flush=True)
