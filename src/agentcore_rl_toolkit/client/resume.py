"""Resuming a run: compares the ledger of earlier processes with the rows of this one."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from ..contract import Cause, Outcome
from ..errors import (
    AgentCoreRLError,
    ConfigError,
    RolloutError,
    RolloutLostError,
)
from .batch import BatchItem, BatchPlan, make_item
from .future import Verdict
from .ledger import Attempt, FileLedger, attempts_of, fingerprint, last_attempts
from .lifecycle.rollout import Engine
from .settings import RolloutRequest

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
    last = last_attempts(attempts)
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
    spent_s = max(0.0, time.time() - known.intent_s)
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
