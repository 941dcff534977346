"""Stored records again: read them, and score them with another reward, without running an agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..contract import RECORD_SUFFIX, IdValue, Outcome, extract_reward
from ..errors import AgentError, ContractError
from ..store import ObjectStore
from .results import ResultReader

Reward = Callable[..., float | Awaitable[float]]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One stored record.

    ``stored`` is the reward in the record, ``reward`` the one just computed; each is None where there is none. ``error`` is what
    made the record unusable, or what the reward raised.
    """

    key: str
    input_id: str
    session_id: str
    outcome: Outcome
    record: dict[str, Any] | None
    stored: float | None = None
    reward: float | None = None
    error: BaseException | None = None

    @property
    def changed(self) -> bool:
        """Whether the new reward differs from the stored one."""
        return self.reward != self.stored


async def replay_async(
    store: ObjectStore,
    exp_id: str,
    reward: Reward | None = None,
    *,
    input_id: IdValue | None = None,
    concurrency: int = 64,
    within_s: float = 120.0,
) -> AsyncIterator[Replayed]:
    """Read the records of an experiment (or of one input), sorted by key, and apply `reward` to those that ended `ok`.

    ``reward(record=..., payload=...)`` gets the record and the payload that the agent was called with; it may be async.

    Raises: StoreError when the store cannot be listed.
    """
    prefix = f"{exp_id}/{input_id}/" if input_id is not None else f"{exp_id}/"
    keys = [item.key for item in await store.list_async(prefix) if item.key.endswith(RECORD_SUFFIX)]
    reader = ResultReader(store, concurrency)
    ahead = 2 * concurrency  # records are read this far ahead of the consumer, so that memory stays bounded
    reads: dict[str, asyncio.Task[Replayed]] = {}
    try:
        for position, key in enumerate(keys):
            for upcoming in keys[position : position + ahead]:
                if upcoming not in reads:
                    reads[upcoming] = asyncio.create_task(_one(reader, upcoming, exp_id, reward, within_s))
            yield await reads[key]
            del reads[key]
            reads = {k: task for k, task in reads.items() if k > key}
    finally:
        for task in reads.values():
            task.cancel()


async def _one(reader: ResultReader, key: str, exp_id: str, reward: Reward | None, within_s: float) -> Replayed:
    middle, _, name = key.removeprefix(f"{exp_id}/").rpartition("/")
    make = partial(Replayed, key=key, input_id=middle, session_id=name.removesuffix(RECORD_SUFFIX))
    verdict = await reader.read(key, within_s)
    if verdict is None:
        return make(outcome=Outcome.LOST, record=None)
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
