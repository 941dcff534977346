"""Reads a record: from bytes in the store to a verdict."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from ...contract import Cause, Outcome, extract_reward, parse_record, record_cause, record_failure, record_outcome
from ...errors import (
    AgentError,
    ConfigError,
    ContractError,
    InvalidResultError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    RolloutCancelledError,
    RolloutError,
    RolloutLostError,
    RolloutThrottledError,
    RolloutTimeoutError,
    StoreError,
    StorePermissionError,
)
from ...proof import Proof
from ...store import ObjectStore
from ..data_plane.pacing import backoff_s
from ..future import Verdict
from ..proofs import ANYTHING, Expected

READS_AT_ONCE = 64


def judge(body: bytes, key: str, expected: Expected = ANYTHING) -> Verdict:
    """The verdict that a stored record stands for. Never raises: a record that cannot be used is the outcome `invalid`.

    What a forger wrote is not even decoded.
    """
    proof = expected.judge(body, key)
    why = None
    if proof is Proof.FORGED:
        why = (
            f"the record at {key!r} does not prove that it comes from its session: something else wrote or changed it. "
            "Find out who may write to the store, and run the rollout again"
        )
    elif proof is Proof.UNPROVEN and expected.required:
        why = (
            f"nothing proves that the record at {key!r} comes from its session, and require_proof=True asks for that. "
            "Its agent may run another toolkit or an older one, or the session was started with another proof_key"
        )
    if why is not None:
        error = InvalidResultError(why, key=key, cause=Cause.INFRASTRUCTURE)
        return Verdict(outcome=Outcome.INVALID, error=error, proof=proof)
    return dataclasses.replace(_judged(body, key), proof=proof)


def _judged(body: bytes, key: str) -> Verdict:
    try:
        record = parse_record(body)
    except ContractError as e:
        return Verdict(outcome=Outcome.INVALID, error=InvalidResultError(str(e), key=key))
    outcome = record_outcome(record)
    if outcome is Outcome.OK:
        try:
            extract_reward(record)
        except ContractError as e:
            error = InvalidResultError(str(e), key=key)
            return Verdict(outcome=Outcome.INVALID, record=record, error=error)
        return Verdict(outcome=outcome, record=record)
    return Verdict(outcome=outcome, record=record, error=record_error(outcome, record, key))


def record_error(outcome: Outcome, record: Mapping[str, Any], key: str | None) -> RolloutError:
    """The exception that describes a record with an outcome other than `ok`."""
    reason = str(record.get("stop_reason") or "")
    error_type, trace = _text(record.get("error_type")), _text(record.get("traceback"))
    what = reason or error_type or "no reason given"
    if outcome is Outcome.AGENT_ERROR:
        cause = record_cause(record, outcome)
        who = "the policy failed" if cause is Cause.POLICY else "the agent failed"
        return AgentError(
            f"{who}: {what}",
            error_type=error_type,
            agent_traceback=trace,
            cause=str(cause),
            failure=record_failure(record, outcome),
            key=key,
        )
    if outcome is Outcome.TIMEOUT:
        stage = record.get("stage")
        return RolloutTimeoutError(
            f"the agent ran out of time: {reason}", stage=None if stage is None else str(stage), key=key
        )
    if outcome is Outcome.LOST:
        message = f"the infrastructure failed the agent: {what}"
        return RolloutLostError(message, error_type=error_type, agent_traceback=trace, key=key)
    if outcome is Outcome.THROTTLED:
        return RolloutThrottledError(reason, key=key)
    if outcome is Outcome.CANCELLED:
        return RolloutCancelledError(reason or "the agent was cancelled", key=key)
    return InvalidResultError(f"the record cannot be used: {reason or record.get('outcome')}", key=key)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


class ResultReader:
    """Reads records of one store, a bounded number at a time."""

    def __init__(self, store: ObjectStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._gate = asyncio.Semaphore(READS_AT_ONCE)
        self.requests = 0

    async def read(self, key: str, within_s: float, expected: Expected = ANYTHING) -> Verdict | None:
        """The verdict of a record; None when there is no such object.

        Faults of the store are waited out for `within_s` seconds. A refusal (403) ends this rollout alone, as does a record above
        the limit, of which nothing is read.
        """
        failures = 0
        async with self._gate:
            deadline_s = time.monotonic() + within_s
            while True:
                self.requests += 1
                try:
                    body = await self._store.get_async(
                        key, max_bytes=self._max_bytes, timeout_s=max(0.0, deadline_s - time.monotonic())
                    )
                    return judge(body, key, expected)
                except ObjectNotFoundError:
                    return None
                except ObjectTooLargeError as e:
                    error: RolloutError = InvalidResultError(
                        f"the record is too large: {e}. The agent should store large data elsewhere and return its key; "
                        "WatchSettings(max_record_bytes=) sets the limit",
                        key=key,
                    )
                    error.__cause__ = e
                    return Verdict(outcome=Outcome.INVALID, error=error)
                except (StorePermissionError, ConfigError) as e:
                    return Verdict(outcome=Outcome.INVALID, error=e)
                except StoreError as e:
                    failures += 1
                    pause_s = backoff_s(failures, cap_s=5.0)
                    # A second try always: the first one may have failed because this process stood still.
                    if failures > 1 and time.monotonic() + pause_s >= deadline_s:
                        error = RolloutTimeoutError(
                            f"the record could not be read within {within_s:g} s: {e}", stage="result", key=key
                        )
                        error.__cause__ = e
                        return Verdict(outcome=Outcome.TIMEOUT, error=error)
                    await asyncio.sleep(pause_s)
