"""Reads stored records and scores them with another reward, without running an agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...contract import RECORD_SUFFIX, Cause, IdValue, Outcome, extract_reward
from ...errors import AgentError, ContractError
from ...store import ObjectStore
from .results import READS_AT_ONCE, ResultReader

Reward = Callable[..., float | Awaitable[float]]

READ_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One stored record. ``cause`` is whose failure it is where it did not end `ok`.

    ``stored`` is the reward in the record, ``reward`` the one just computed; each is None where there is none. ``error`` is what
    made the record unusable, or what the reward raised.
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
        """Whether the new reward differs from the stored one."""
        return self.reward != self.stored


async def replayed(
    store: ObjectStore, exp_id: str, input_id: IdValue | None, max_record_bytes: int, reward: Reward | None
) -> AsyncIterator[Replayed]:
    """The records of an experiment, or of one input, sorted by key. They are read in portions, so that memory stays bounded."""
    prefix = f"{exp_id}/{input_id}/" if input_id is not None else f"{exp_id}/"
    keys = [item.key for item in await store.list_async(prefix) if item.key.endswith(RECORD_SUFFIX)]
    reader = ResultReader(store, max_record_bytes)
    for begin in range(0, len(keys), READS_AT_ONCE):
        for one in await asyncio.gather(
            *(_one(reader, key, exp_id, reward) for key in keys[begin : begin + READS_AT_ONCE])
        ):
            yield one


async def _one(reader: ResultReader, key: str, exp_id: str, reward: Reward | None) -> Replayed:
    input_id, _, name = key.removeprefix(f"{exp_id}/").rpartition("/")
    found = Replayed(
        key=key, input_id=input_id, session_id=name.removesuffix(RECORD_SUFFIX), outcome=Outcome.LOST, record=None
    )
    verdict = await reader.read(key, READ_S)
    if verdict is None:
        return replace(found, cause=Cause.INFRASTRUCTURE)
    found = replace(found, outcome=verdict.outcome, record=verdict.record, cause=verdict.cause, error=verdict.error)
    if verdict.outcome is not Outcome.OK or verdict.record is None:
        return found
    found = replace(found, stored=extract_reward(verdict.record))
    if reward is None:
        return found
    try:
        return replace(found, reward=await _score(reward, verdict.record))
    except Exception as e:  # the reward is user code: one record it fails on is data
        error = AgentError(f"the reward raised {type(e).__name__}: {e}", error_type=type(e).__name__, key=key)
        error.__cause__ = e
        return replace(found, error=error)


async def _score(reward: Reward, record: Mapping[str, Any]) -> float:
    value = reward(record=record, payload=record.get("payload"))
    if inspect.isawaitable(value):
        value = await value
    number = extract_reward({"rewards": value})
    if number is None:
        raise ContractError("the reward returned None")
    return number
