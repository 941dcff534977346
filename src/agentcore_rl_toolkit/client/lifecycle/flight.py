"""A rollout on its way through the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from ...contract import Outcome, Stage
from ...errors import RolloutCancelledError, RolloutTimeoutError
from ..future import Progress, RolloutFuture, Verdict
from ..proofs import ANYTHING, Expected
from ..records.watcher import Waiter, Watcher
from ..settings import RolloutRequest


class NoSignError(Exception):
    """The answer to the invoke is missing, and neither a heartbeat nor a record appeared."""


class AttemptEnded(Exception):  # noqa: N818  (a way out, not an error)
    """The attempt is over, with this verdict."""

    def __init__(self, outcome: Outcome, error: BaseException) -> None:
        super().__init__(str(error))
        self.verdict = Verdict(outcome=outcome, error=error)


@dataclass(frozen=True, kw_only=True)
class Adoption:
    """A session that an earlier process started.

    Attributes:
        accepted: its invoke is known to have been accepted.
        proof_key: name of the key that its secret comes from; None: not known.
        promised: its agent said that it proves its records.
    """

    accepted: bool
    bucket: str
    key: str
    proof_key: str | None = None
    promised: bool = False


@dataclass(eq=False)
class Flight:
    """A rollout inside the engine."""

    request: RolloutRequest
    future: RolloutFuture
    progress: Progress
    task: asyncio.Task[None] | None = None
    forced: Verdict | None = None  # the verdict that the owner of the future asked for
    invoke: asyncio.Future[bytes] | None = None  # the invoke on the wire or answered; None while no session can exist
    server_errors: int = 0  # answers of this attempt that said 500 or 503
    server_error: Exception | None = None  # the last answer, when it was one of them
    adopted: Adoption | None = None
    waiting: tuple[Watcher, Waiter] | None = None
    notified: bool = False
    last_stop: asyncio.Task[None] | None = None
    expected: Expected = ANYTHING  # of the record of the session under way

    def accept(self) -> None:
        """The invoke was accepted, or may have been: whoever waits for that goes on."""
        if not self.future._accepted.done():
            self.future._accepted.set_result(None)

    def take_invoke(self) -> asyncio.Future[bytes] | None:
        """The invoke whose session has to be stopped, if there is one."""
        call, self.invoke = self.invoke, None
        return call

    def verdict_asked_for(self) -> Verdict:
        """The verdict of a rollout whose task was cancelled."""
        if self.forced is not None:
            return self.forced
        return Verdict(outcome=Outcome.CANCELLED, error=RolloutCancelledError("the client's loop ended"))


def timed_out(flight: Flight, stage: Stage) -> AttemptEnded:
    """The end of an attempt whose deadline passed in a stage."""
    spent_s = flight.progress.stages().get(stage.value, 0.0)
    timeout_s = flight.request.timeout_s
    text = f"Timeout after {timeout_s:g}s" if timeout_s is not None and stage is not Stage.QUEUE else "deadline passed"
    trouble = flight.progress.trouble()
    why = f"; its record could not be looked for: {trouble}" if trouble is not None else ""
    error = RolloutTimeoutError(f"{text} (stage: {stage.value}, {spent_s:.1f} s in it){why}", stage=stage.value)
    return AttemptEnded(Outcome.TIMEOUT, error)


def attempt_limit(flight: Flight) -> float | None:
    """Loop time at which the attempt must be over, from the deadline of the run and the caller's timeout."""
    request = flight.request
    began_s = flight.progress.entered_s.get(Stage.START, time.monotonic())
    limits = [] if request.timeout_s is None else [began_s + request.timeout_s]
    if request.deadlines.run_s is not None:
        limits.append(time.monotonic() + request.deadlines.run_s + request.deadlines.result_s)
    return min(limits) if limits else None


def described(flight: Flight) -> dict[str, Any]:
    """Where a rollout is, for whoever wonders why it does not end. Units: seconds; ``left_s`` until the stage's deadline."""
    progress, deadlines = flight.progress, flight.request.deadlines
    now = time.monotonic()
    stage = progress.stage
    began_s = progress.entered_s.get(stage, now)
    limits = {
        Stage.QUEUE: deadlines.queue_s,
        Stage.START: deadlines.start_s,
        Stage.RUN: deadlines.run_s,
        Stage.RESULT: deadlines.result_s,
        Stage.STOP: deadlines.stop_s,
    }
    ends = [] if (limit := limits[stage]) is None else [began_s + limit]
    if flight.request.timeout_s is not None and stage in (Stage.START, Stage.RUN):
        ends.append(progress.entered_s.get(Stage.START, began_s) + flight.request.timeout_s)
    trouble = progress.trouble()
    return {
        "session_id": progress.session_id,
        "input_id": progress.input_id,
        "attempt": progress.attempt,
        "stage": stage.value,
        "stage_s": now - began_s,
        "total_s": now - min(progress.entered_s.values(), default=now),
        "left_s": min(ends) - now if ends else None,
        "trouble": None if trouble is None else str(trouble),
    }
