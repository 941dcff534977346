"""Reads stored records and scores them with another reward, without running an agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...contract import RECORD_SUFFIX, Cause, IdValue, Outcome, extract_reward
from ...errors import AgentError, ConfigError, ContractError
from ...proof import Proof
from ...store import ObjectStore
from ..ledger import Attempt, FileLedger, attempts_of, key_file, parse_lines
from ..proofs import Expected, Proofs, read_key
from .results import ResultReader

ExpectedOf = Callable[[str], Expected]
Reward = Callable[..., float | Awaitable[float]]

READS_AT_ONCE, READ_S = 64, 120.0


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One stored record. ``cause`` is whose failure it is where it did not end `ok`.

    ``proof`` is what the record proves of its origin. ``stored`` is the reward in the record, ``reward`` the one just computed;
    each is None where there is none. ``error`` is what made the record unusable, or what the reward raised.
    """

    key: str
    input_id: str
    session_id: str
    outcome: Outcome
    record: dict[str, Any] | None
    cause: Cause | None = None
    proof: Proof | None = None
    stored: float | None = None
    reward: float | None = None
    error: BaseException | None = None

    @property
    def changed(self) -> bool:
        """Whether the new reward differs from the stored one."""
        return self.reward != self.stored


async def replayed(
    store: ObjectStore, exp_id: str, input_id: IdValue | None, reward: Reward | None, expected: ExpectedOf
) -> AsyncIterator[Replayed]:
    """The records of an experiment, or of one input. ``expected(key)`` says what a record must prove."""
    prefix = f"{exp_id}/{input_id}/" if input_id is not None else f"{exp_id}/"
    keys = [item.key for item in await store.list_async(prefix) if item.key.endswith(RECORD_SUFFIX)]
    reader = ResultReader(store, READS_AT_ONCE)
    ahead = 2 * READS_AT_ONCE  # records are read this far ahead of the consumer, so that memory stays bounded
    reads: dict[str, asyncio.Task[Replayed]] = {}
    try:
        for position, key in enumerate(keys):
            for upcoming in keys[position : position + ahead]:
                if upcoming not in reads:
                    reads[upcoming] = asyncio.create_task(_one(reader, upcoming, exp_id, reward, expected(upcoming)))
            yield await reads[key]
            del reads[key]
            reads = {k: task for k, task in reads.items() if k > key}
    finally:
        for task in reads.values():
            task.cancel()


def expected_of_records(proofs: Proofs, ledger: Path | None) -> ExpectedOf:
    """The proofs that records must have, by key: for a ledger's sessions as it says, for others none.

    Raises: ConfigError when the ledger or its key cannot be read.
    """
    known: dict[str, Attempt] = {}
    kept: FileLedger | None = None
    if ledger is not None:
        try:
            known = {a.key: a for a in attempts_of(parse_lines(ledger.read_bytes())).values()}
        except OSError as e:
            raise ConfigError(f"the ledger {ledger} cannot be read: {e}") from e
        kept = FileLedger(ledger)
        kept.proof_key = read_key(key_file(ledger))

    def expected(key: str) -> Expected:
        attempt = known.get(key)
        if attempt is None:
            return proofs.expected(key.rpartition("/")[2].removesuffix(RECORD_SUFFIX))
        return proofs.expected(attempt.session_id, kept, key_id=attempt.proof_key, promised=attempt.promised)

    return expected


async def _one(reader: ResultReader, key: str, exp_id: str, reward: Reward | None, expected: Expected) -> Replayed:
    middle, _, name = key.removeprefix(f"{exp_id}/").rpartition("/")
    make = partial(Replayed, key=key, input_id=middle, session_id=name.removesuffix(RECORD_SUFFIX))
    verdict = await reader.read(key, READ_S, expected)
    if verdict is None:
        return make(outcome=Outcome.LOST, record=None, cause=Cause.INFRASTRUCTURE)
    make = partial(make, proof=verdict.proof, cause=verdict.cause)
    if verdict.outcome is not Outcome.OK or verdict.record is None:
        return make(outcome=verdict.outcome, record=verdict.record, error=verdict.error)
    stored = extract_reward(verdict.record)
    if reward is None:
        return make(outcome=verdict.outcome, record=verdict.record, stored=stored)
    try:
        value = await _score(reward, verdict.record)
    except Exception as e:  # the reward is user code: one record it fails on is data
        error = AgentError(f"the reward raised {type(e).__name__}: {e}", error_type=type(e).__name__, key=key)
        error.__cause__ = e
        return make(outcome=Outcome.OK, record=verdict.record, stored=stored, error=error)
    return make(outcome=Outcome.OK, record=verdict.record, stored=stored, reward=value)


async def _score(reward: Reward, record: Mapping[str, Any]) -> float:
    value = reward(record=record, payload=record.get("payload"))
    if inspect.isawaitable(value):
        value = await value
    number = extract_reward({"rewards": value})
    if number is None:
        raise ContractError("the reward returned None")
    return number
