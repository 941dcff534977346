"""Batches: many rollouts, a bounded number at a time, results as they come."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .._portal import Portal
from ..contract import Cause, IdValue, Outcome
from ..errors import (
    AgentCoreRLError,
    AgentError,
    ConfigError,
    RolloutError,
    RolloutLostError,
)
from ..proof import Proof
from .future import RolloutFuture, Verdict
from .ledger import Attempt, FileLedger, attempts_of, fingerprint
from .lifecycle.rollout import Engine
from .settings import RolloutRequest

logger = logging.getLogger(__name__)

LINE_CHARS = 1_000  # of an error: some agents put a whole page into their exception's text
LEAST_WAIT_S = 30.0  # a resumed session whose time is up gets this long: its record may already be there
_ERRORS = {kind.outcome: kind for kind in RolloutError.__subclasses__()}


async def plan_resume(
    requests: Sequence[RolloutRequest],
    ledger: FileLedger,
    *,
    engine: Engine,
    mode: bool | Literal["retry_failed"],
    fixed_inputs: bool,
) -> BatchPlan:
    """Decide for each row: known, running, or to be sent. With ``mode=False`` the ledger is only written.

    Raises: ConfigError when a row is not the one that the ledger holds under its index.
    """
    lines = ledger.open()
    attempts = attempts_of(lines) if mode else {}
    last = {attempt.index: attempt for attempt in attempts.values()}
    run: list[tuple[RolloutRequest, Attempt | None]] = []
    finished: list[tuple[RolloutRequest, Attempt]] = []
    for request in requests:
        request = dataclasses.replace(request, ledger=ledger)
        assert request.index is not None
        known = last.get(request.index)
        if known is None:
            run.append((request, None))
            continue
        _check_same(request, known, fixed_inputs)
        config = {**request.config, "input_id": known.input_id}
        request = dataclasses.replace(request, input_id=known.input_id, config=config)
        if known.outcome is None:
            run.append((_adopt(request, known), known))
        elif known.outcome is Outcome.CANCELLED or (mode == "retry_failed" and _may_run_again(known)):
            # Cancelled is what an interrupted batch does to its rollouts; it is no verdict on them.
            run.append((dataclasses.replace(request, first_attempt=known.attempt + 1), None))
        else:
            finished.append((request, known))
    adopted = {known.session_id for _, known in run if known is not None}
    stop = [a for a in attempts.values() if not a.stopped and a.session_id not in adopted]
    ready = await asyncio.gather(*(_item(engine, request, known) for request, known in finished))
    return BatchPlan(run=run, ready=ready, stop=stop, ledger=ledger)


def _may_run_again(known: Attempt) -> bool:
    """Whether a finished rollout failed. What the policy failed at is a result: another try would be a second draw."""
    return known.outcome is not Outcome.OK and known.cause != Cause.POLICY


def _check_same(request: RolloutRequest, known: Attempt, fixed_inputs: bool) -> None:
    if fingerprint(request.payload) != known.payload:
        raise ConfigError(
            f"row {request.index} is not the one in the ledger (its payload differs); resume with the same rows in the same "
            "order, or use another exp_id or ledger"
        )
    if fixed_inputs and str(request.input_id) != str(known.input_id):
        raise ConfigError(f"row {request.index} has input id {request.input_id!r}, the ledger {known.input_id!r}")


def _adopt(request: RolloutRequest, known: Attempt) -> RolloutRequest:
    """The request with the session that runs, and what is left of its time."""
    timeout_s = request.timeout_s
    deadlines = request.deadlines
    spent_s = 0.0 if known.accepted_s is None else max(0.0, time.time() - known.accepted_s)
    if timeout_s is not None:
        timeout_s = max(timeout_s - spent_s, LEAST_WAIT_S)
    if deadlines.run_s is not None:
        deadlines = dataclasses.replace(deadlines, run_s=max(deadlines.run_s - spent_s, LEAST_WAIT_S))
    return dataclasses.replace(
        request, session_id=known.session_id, first_attempt=known.attempt, timeout_s=timeout_s, deadlines=deadlines
    )


async def _item(engine: Engine, request: RolloutRequest, known: Attempt) -> BatchItem:
    """The item of a rollout that an earlier process finished: its record, or what the ledger says."""
    assert known.outcome is not None
    expected = engine.proofs.expected(known.session_id, request.ledger, key_id=known.proof_key, promised=known.promised)
    verdict = await engine.stores.reader(known.bucket).read(known.key, request.deadlines.result_s, expected)
    if verdict is None and known.outcome is Outcome.OK:
        error: RolloutError = RolloutLostError("the ledger says ok, but the record is gone from the store")
        verdict = Verdict(outcome=Outcome.LOST, error=error)
    elif verdict is None:
        error = _ERRORS[known.outcome](known.error or known.outcome.value)
        if known.cause is not None:
            error.cause = known.cause
        verdict = Verdict(outcome=known.outcome, error=error)
    if isinstance(verdict.error, AgentCoreRLError):
        verdict.error.session_id, verdict.error.input_id = known.session_id, known.input_id
        verdict.error.key = known.key
    return make_item(
        verdict,
        index=request.index,
        input_id=known.input_id,
        session_id=known.session_id,
        attempt=known.attempt,
    )


@dataclass
class BatchItem:
    """One finished rollout of a batch.

    ``success`` is True only for the outcome `ok`: a crashed agent is not a success, though ``result`` holds its record.

    Attributes:
        result: the stored record, if there is one.
        error: what went wrong, in one line.
        cause: whose failure it is: the agent's, the policy's, the infrastructure's; None where it did not fail.
        failure: what the policy failed at, where it is the cause: tokens, turns, context, calls or other.
        traceback: the agent's own traceback where it stored one, else ours where something was raised; None elsewhere.
        index: position of the payload in the batch.
        elapsed: seconds from the moment the rollout left the batch's queue.
        stages: seconds spent in each stage.
        proof: what the record proves of its origin; None where there is none.
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
    """How far a batch is. Units: ``elapsed_s`` seconds. ``unproven``: records whose origin nothing proves. ``causes``: failures
    by whose they are.
    """

    total: int
    done: int
    ok: int
    running: int
    elapsed_s: float
    outcomes: Mapping[str, int]
    unproven: int = 0
    forged: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        failed = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.items()) if name != "ok")
        bad = f", {failed}" if failed else ""
        policy = self.causes.get(Cause.POLICY, 0)
        bad += f" ({policy} the policy's)" if policy else ""
        bad += f", {self.unproven} unproven" if self.unproven else ""
        bad += f", {self.forged} forged" if self.forged else ""
        return f"{self.done}/{self.total} done, {self.ok} ok{bad}, {self.running} running, {self.elapsed_s:.0f} s"


def item_of(future: RolloutFuture, index: int | None) -> BatchItem:
    """The batch item of a finished rollout."""
    return make_item(
        future._done.result(),
        index=index,
        elapsed=future.elapsed(),
        input_id=future.input_id,
        session_id=future.session_id,
        attempt=future.attempt,
        stages=future.stages,
    )


def make_item(verdict: Verdict, **about: Any) -> BatchItem:
    """The batch item that says how a rollout ended; `about` are its other fields."""
    return BatchItem(
        success=verdict.outcome is Outcome.OK,
        result=verdict.record,
        error=None if verdict.error is None else error_line(verdict.error),
        exception=verdict.error,
        outcome=verdict.outcome,
        proof=verdict.proof,
        traceback=None if verdict.error is None else traceback_of(verdict.error),
        cause=verdict.cause,
        failure=verdict.failure,
        **about,
    )


def error_line(error: BaseException) -> str:
    """An error in one line, with the class that the agent raised, cut at `LINE_CHARS`: the lines of a longer one are joined."""
    kind = getattr(error, "error_type", None) if isinstance(error, AgentCoreRLError) else type(error).__name__
    text = str(error) if kind is None or kind in str(error) else f"{kind}: {error}"
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip()) or type(error).__name__
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 3]}..."


def traceback_of(error: BaseException) -> str | None:
    """The agent's own traceback where it stored one, else ours; None where nothing was raised: there its line says it all."""
    if isinstance(error, (AgentError, RolloutLostError)) and error.agent_traceback:
        return error.agent_traceback
    if error.__traceback__ is None and error.__cause__ is None:
        return None
    return "".join(traceback.format_exception(error))


@dataclass(kw_only=True)
class BatchPlan:
    """The work of a batch: items known already, rollouts to run or to adopt, sessions left over to stop."""

    run: Sequence[tuple[RolloutRequest, Attempt | None]]
    ready: Sequence[BatchItem] = ()
    stop: Sequence[Attempt] = ()
    ledger: FileLedger | None = None


ProgressHook = Callable[[BatchProgress], object]


class BatchRun:
    """One pass over a batch: iterate it with `for` or `async for`.

    Leaving it early stops every session it started: on `break` (when the loop drops the iterator), on an exception, on
    Ctrl-C, or on `close()`.
    """

    def __init__(
        self,
        portal: Portal,
        engine: Engine,
        size: int,
        plan: Callable[[], Awaitable[BatchPlan]],
        *,
        max_concurrent: int,
        progress: ProgressHook | None,
        log_interval: float,
    ) -> None:
        self._portal = portal
        self._left = size
        self._over = False
        self._feed = _Feed(engine, max_concurrent, _Reporter(size, progress, log_interval))
        portal.submit(self._feed.run(plan))

    # ---- sync and async iteration over the same items

    def __iter__(self) -> BatchRun:
        return self

    def __next__(self) -> BatchItem:
        try:
            while self._waits():
                self._portal.call(self._feed.arrived())
        except BaseException:
            self.close()
            raise
        item = self._take()
        if item is None:
            raise StopIteration
        return item

    def __aiter__(self) -> BatchRun:
        return self

    async def __anext__(self) -> BatchItem:
        try:
            while self._waits():
                await self._portal.run(self._feed.arrived())
        except BaseException:
            self.close()
            raise
        item = self._take()
        if item is None:
            raise StopAsyncIteration
        return item

    def _waits(self) -> bool:
        return self._left > 0 and not self._over and not self._feed.items

    def _take(self) -> BatchItem | None:
        """The next item; None at the end. Raises: what the batch failed with."""
        if self._left == 0 or self._over:
            self.close()
            return None
        item = self._feed.items.popleft()
        if isinstance(item, BatchItem):
            self._left -= 1
            return item
        self._over = True
        if item is not None:
            raise item
        return None

    # ---- leaving

    def close(self) -> None:
        """Stop what this batch started and has not finished. Returns at once; sessions are stopped in the background."""
        if self._over:
            return
        self._over = True
        if self._left:
            self._portal.post(self._feed.abort)

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.close()


class _Feed:
    """Starts the rollouts of a batch and collects their items, on the client's loop. Separate from `BatchRun`, which must be
    collectable while this runs.

    Attributes:
        items: what has ended and was not taken yet, by one consumer. An exception or None in the place of one is the end.
    """

    def __init__(self, engine: Engine, max_concurrent: int, report: _Reporter) -> None:
        self.items: deque[BatchItem | BaseException | None] = deque()
        self._engine, self._report = engine, report
        self._slots = asyncio.Semaphore(max_concurrent)
        self._more = asyncio.Event()
        self._live: set[RolloutFuture] = set()
        self._task: asyncio.Task[Any] | None = None
        self._aborted = False  # maybe before its first step

    async def arrived(self) -> None:
        """Wait for an item."""
        while not self.items:
            self._more.clear()
            await self._more.wait()

    def abort(self) -> None:
        """Start nothing more, cancel what runs."""
        self._aborted = True
        if self._task is not None:
            self._task.cancel()
        for future in list(self._live):
            future.cancel()

    async def run(self, plan: Callable[[], Awaitable[BatchPlan]]) -> None:
        """Start all rollouts, a bounded number at a time."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        try:
            todo = BatchPlan(run=()) if self._aborted else await plan()
            for attempt in todo.stop:
                self._engine.stop(attempt.session_id, todo.ledger)
            for item in todo.ready:
                self._put(item)
            for request, adopted in todo.run:
                await self._slots.acquire()
                future = self._engine.submit(request, adopted)
                self._live.add(future)

                def done(_: object, future: RolloutFuture = future, index: int | None = request.index) -> None:
                    loop.call_soon_threadsafe(self._ended, future, index)

                future._done.add_done_callback(done)
        except asyncio.CancelledError:
            self._put(None)
        except Exception as e:
            self._put(e)

    def _ended(self, future: RolloutFuture, index: int | None) -> None:
        self._live.discard(future)
        self._slots.release()
        self._put(item_of(future, index))

    def _put(self, item: BatchItem | BaseException | None) -> None:
        if isinstance(item, BatchItem):
            self._report.finished(item, len(self._live))
        self.items.append(item)
        self._more.set()


class _Reporter:
    def __init__(self, total: int, hook: ProgressHook | None, log_interval: float) -> None:
        self._total, self._hook, self._interval = total, hook, log_interval
        self._outcomes: Counter[str] = Counter()
        self._proofs: Counter[Proof | None] = Counter()
        self._causes: Counter[str] = Counter()
        self._began_s = self._logged_s = time.monotonic()

    def finished(self, item: BatchItem, running: int) -> None:
        self._outcomes[str(item.outcome or Outcome.LOST)] += 1
        self._proofs[item.proof] += 1
        if item.cause is not None:
            self._causes[str(item.cause)] += 1
        now = time.monotonic()
        due = self._interval > 0 and now - self._logged_s >= self._interval
        if self._hook is None and not due:
            return
        progress = BatchProgress(
            total=self._total,
            done=self._outcomes.total(),
            ok=self._outcomes[str(Outcome.OK)],
            running=running,
            elapsed_s=now - self._began_s,
            outcomes=dict(self._outcomes),
            unproven=self._proofs[Proof.UNPROVEN],
            forged=self._proofs[Proof.FORGED],
            causes=dict(self._causes),
        )
        if due:
            self._logged_s = now
            logger.info("batch: %s", progress)
        if self._hook is not None:
            try:
                self._hook(progress)
            except Exception:
                logger.exception("the progress hook of a batch failed")


class BatchResult:
    """Result of `RolloutClient.run_batch`: `for` or `async for` runs the batch. Each loop is a run of its own."""

    def __init__(self, start: Callable[[], BatchRun], size: int) -> None:
        self._start = start
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BatchItem]:
        return self._start()

    def __aiter__(self) -> AsyncIterator[BatchItem]:
        return self._start()


AsyncBatchResult = BatchResult  # the published client's name of what `run_batch_async` returns


def print_progress(progress: BatchProgress) -> None:
    """Progress as one line on stderr, rewritten in place on a terminal."""
    end = "\n" if progress.done == progress.total or not sys.stderr.isatty() else "\r"
    print(f"{progress}", end=end, file=sys.stderr, flush=True)
