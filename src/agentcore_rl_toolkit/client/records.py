"""Records in the store: reads and judges one, and replays old ones with another reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..contract import (
    RECORD_SUFFIX,
    Cause,
    IdValue,
    Outcome,
    cause_of,
    extract_reward,
    parse_record,
    record_error,
)
from ..errors import (
    AgentCoreRLError,
    AgentError,
    ContractError,
    GatewayError,
    InvalidResultError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    RolloutError,
    RolloutLostError,
    RolloutTimeoutError,
    StoreError,
)
from ..proof import Proof, check
from ..store import ObjectStore

READS_AT_ONCE = 64
REPLAY_READ_S, REPLAY_LIST_S = 120.0, 1_800.0
Reward = Callable[..., float | Awaitable[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The end of a rollout: the record if it exists, and the error if the rollout did not end `ok`."""

    record: dict[str, Any] | None = None
    error: BaseException | None = None
    proof: Proof | None = None  # set if a record was read

    @property
    def outcome(self) -> Outcome:
        """The outcome. Settings, credentials and the store make it `invalid`, the gateway and the caller's own code `lost`."""
        if self.error is None:
            return Outcome.OK
        if isinstance(self.error, RolloutError):
            return Outcome(self.error.outcome)
        lasting = isinstance(self.error, AgentCoreRLError) and not isinstance(self.error, GatewayError)
        return Outcome.INVALID if lasting else Outcome.LOST

    @property
    def cause(self) -> Cause | None:
        """The cause of the failure, or None if there is none."""
        return cause_of(self.error)

    @property
    def failure(self) -> str | None:
        """The policy's failure, if the policy is the cause: a key of `errors.POLICY_FAILURES`."""
        return self.error.failure if isinstance(self.error, AgentError) else None


def judge(
    body: bytes, key: str, *, secret: str | None = None, promised: bool = False, required: bool = False
) -> Verdict:
    """Judge a stored record. A record that cannot be used is `invalid`. A forged one is not decoded.

    Args:
        secret: of the session, or None when it is unknown here.
        promised: the agent promised to prove its records, so a record without a proof is a forgery too.
        required: a record without a proof is refused.
    """
    proof = Proof.UNPROVEN if secret is None else check(body, key, secret)
    if proof is Proof.UNPROVEN and promised and secret is not None:
        proof = Proof.FORGED
    if proof is Proof.FORGED or (proof is Proof.UNPROVEN and required):
        why = "something else wrote or changed it. Find out who may write to the store"
        if proof is Proof.UNPROVEN:
            why = "require_proof=True asks for a proof, and its agent, perhaps of another toolkit, wrote none"
        text = f"the record at {key!r} does not prove that it comes from its session: {why}"
        return Verdict(error=InvalidResultError(text, key=key, cause=Cause.INFRASTRUCTURE), proof=proof)
    record, error = None, None
    try:
        record = parse_record(body)
        error = record_error(record, key)
        if error is None:
            extract_reward(record)
    except ContractError as e:
        error = InvalidResultError(str(e), key=key)
    return Verdict(record=record, error=error, proof=proof)


async def read_record(store: ObjectStore, key: str, within_s: float, *, max_bytes: int, **trust: Any) -> Verdict | None:
    """Read and judge a record, or None when there is no such object. Faults of the store are waited out for `within_s`.

    ``trust`` are further arguments of `judge`.

    Raises: InvalidResultError for a record above the limit; RolloutTimeoutError; StoreError and ConfigError if no retry helps.
    """
    for timeout_s in (within_s, 0.0):  # the last attempt is for a process that was stopped during the first one
        try:
            return judge(await store.get_async(key, max_bytes=max_bytes, timeout_s=timeout_s), key, **trust)
        except ObjectNotFoundError:
            return None
        except ObjectTooLargeError as e:
            text = f"the record is too large: {e}. Return a key of the data, or raise WatchSettings(max_record_bytes=)"
            raise InvalidResultError(text, key=key) from e
        except StoreError as e:
            if e.permanent:
                raise
            error = e
    text = f"the record could not be read within {within_s:g} s: {error}"
    raise RolloutTimeoutError(text, stage="result", key=key) from error


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A stored record with its reward.

    Attributes:
        cause: of the failure, if it did not end `ok`.
        stored: the reward in the record.
        reward: the reward just computed.
        error: why the record cannot be used, or what the reward raised.
    """

    key: str
    input_id: str
    session_id: str
    outcome: Outcome
    record: dict[str, Any] | None
    cause: Cause | None = None
    stored: float | None = None
    reward: float | None = None
    error: BaseException | None = None

    @property
    def changed(self) -> bool:
        """True if the new reward differs from the stored one."""
        return self.reward != self.stored


async def replayed(
    store: ObjectStore, exp_id: str, input_id: IdValue | None, max_record_bytes: int, reward: Reward | None
) -> AsyncIterator[Replayed]:
    """Yield the records of an experiment, or of one input, sorted by key. Memory stays bounded."""
    prefix = f"{exp_id}/{input_id}/" if input_id is not None else f"{exp_id}/"
    keys = [
        item.key for item in await store.list_async(prefix, timeout_s=REPLAY_LIST_S) if item.key.endswith(RECORD_SUFFIX)
    ]
    for begin in range(0, len(keys), READS_AT_ONCE):
        portion = keys[begin : begin + READS_AT_ONCE]
        for one in await asyncio.gather(*(_replay(store, key, exp_id, max_record_bytes, reward) for key in portion)):
            yield one


async def _replay(store: ObjectStore, key: str, exp_id: str, max_bytes: int, reward: Reward | None) -> Replayed:
    try:
        found = await read_record(store, key, REPLAY_READ_S, max_bytes=max_bytes)
        verdict = found or Verdict(error=RolloutLostError("it was deleted", key=key))
    except AgentCoreRLError as e:
        verdict = Verdict(error=e)
    stored = scored = None
    error, record = verdict.error, verdict.record
    if error is None and record is not None:
        stored = extract_reward(record)
        try:
            if reward is not None:
                value = reward(record=record, payload=record.get("payload"))
                scored = extract_reward({"rewards": await value if inspect.isawaitable(value) else value})
                if scored is None:
                    raise ContractError("the reward returned None")
        except Exception as e:  # the reward is user code: one record it fails on is data
            error = e
    input_id, _, name = key.removeprefix(f"{exp_id}/").rpartition("/")
    return Replayed(
        key=key,
        input_id=input_id,
        session_id=name.removesuffix(RECORD_SUFFIX),
        outcome=verdict.outcome,
        record=record,
        cause=verdict.cause,
        stored=stored,
        reward=scored,
        error=error,
    )
