"""Finds finished rollouts by listing the store.

Every rollout in flight has two keys under ``{exp_id}/{input_id}/``: a record when it ends, and until then a heartbeat object that
is rewritten periodically. One watcher serves all rollouts of an experiment. A round lists the experiment, or each input in flight
if that takes fewer requests, and the pause after a round keeps its requests within a budget.

Our own clock times the changes of a heartbeat, so the clocks of store and client may differ. Silence counts only for a
session whose agent promised a heartbeat, or whose heartbeat was seen. After `silence_s` without a change, the watcher looks for
the record and the heartbeat directly. A session that shows neither is lost. Silence starts again after a round that failed, or
that came late because this process was stopped. A local runtime reports which sessions are over.

If listing is not permitted, the watcher reads the keys one by one. Faults of the store delay rounds and fail no rollout, except a
permanent one.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..contract import ALIVE_SUFFIX, RECORD_SUFFIX, alive_key
from ..errors import (
    AgentCoreRLError,
    InvalidResultError,
    ObjectNotFoundError,
    RolloutLostError,
    StoreError,
    StorePermissionError,
)
from ..store import ObjectInfo, ObjectStore, backoff_s
from .transport import in_thread

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 32
LOOK_TIMEOUT_S = 15.0  # limit of one request
UNLISTABLE_S = 60.0  # keys are read for this long after the store refused a listing
LONGEST_PAUSE_S = 5.0  # between two rounds that failed
CHECK_S = 0.5  # between two checks for silence
ENDINGS_S = 0.5  # between two questions to a local runtime. A failure makes the pause ten times as long.
MOST_ASKED = 5_000  # sessions in one question
Endings = Callable[[Sequence[str]], Mapping[str, str] | None]
LATE_S = 2.0  # a round this late means that the process did not run, and as a rule its agents did not either


class LookCost(NamedTuple):
    """The cost of looking, which decides how often it happens."""

    interval_s: float  # the shortest pause between two rounds
    page: int  # lines of a listing that cost as much as one more request
    list_s: float  # pause for each page listed
    head_s: float  # pause for each key read


# Four LISTs per second cost 0.07 dollars per hour. A HEAD costs a twelfth of a LIST.
REMOTE_COST = LookCost(interval_s=0.5, page=1000, list_s=0.25, head_s=0.02)
# A call takes 0.2 ms of CPU and a line 8 µs, measured on a directory: looking takes a tenth of a core at most.
LOCAL_COST = LookCost(interval_s=0.05, page=25, list_s=0.002, head_s=0.002)


@dataclass(slots=True, eq=False)
class Waiter:
    """A rollout in flight. ``found`` ends with True when the record exists, or with an error.

    Attributes:
        prefix: the folder of its input, with the final slash.
        expects_life: its agent promised heartbeats for this session.
        silence_s: without a new sign of life for this long, it is lost.
        stamp_changed_s: time of the last sign of life (monotonic).
        stamp: of the heartbeat when last seen.
        seen_life: set by a heartbeat, and by the end.
        ended: its session has ended, and its record was looked for once since then.
    """

    key: str
    session_id: str
    prefix: str
    found: asyncio.Future[bool]
    expects_life: bool
    silence_s: float
    stamp_changed_s: float
    stamp: object = None
    seen_life: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False


class Watcher:
    """Watches the rollouts of one experiment in one store. Lives on the client's loop.

    Args:
        interval_s: the shortest pause between two rounds. None: that of the store's kind.
        endings: returns the cause for each of these sessions that has ended, or None if nothing here knows.
    """

    def __init__(
        self,
        store: ObjectStore,
        root: str,
        *,
        interval_s: float | None = None,
        cost: LookCost | None = None,
        endings: Endings | None = None,
    ) -> None:
        self._store, self._root = store, root
        self._cost = cost or (LOCAL_COST if store.url.startswith(("file:", "memory:")) else REMOTE_COST)
        self._interval_s = self._cost.interval_s if interval_s is None else interval_s
        self._endings = endings
        self._waiters: dict[str, Waiter] = {}
        self._lines = 0  # length of the last listing of the experiment
        self._pages = self._heads = 0  # requests since the last pause
        self._keys_until_s = -math.inf  # keys are read one by one before this time
        self._failures = 0  # rounds that failed in a row
        self._task: asyncio.Task[None] | None = None
        self.trouble: Exception | None = None  # the error of the last round
        self.requests = 0

    def add(self, key: str, session_id: str = "", *, expects_life: bool, silence_s: float) -> Waiter:
        """Start looking for a record. Raises: InvalidResultError if another rollout in flight waits for the same one."""
        if key in self._waiters:
            raise InvalidResultError(
                f"another rollout in flight has its record at {key!r}, too, and one record is the result of one session; the "
                "agent must put the session's id into its key",
                key=key,
            )
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        prefix = key.rpartition("/")[0] + "/"
        waiter = self._waiters[key] = Waiter(key, session_id, prefix, found, expects_life, silence_s, time.monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Stop looking for a record."""
        if self._waiters.get(waiter.key) is waiter:
            del self._waiters[waiter.key]

    async def look_now(self, waiter: Waiter) -> None:
        """Look at one rollout directly. A fault of the store shows nothing."""
        try:
            await self._look_at(waiter)
        except Exception as e:
            logger.debug("the direct request for %s failed: %s", waiter.key, e)

    def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    # ---- rounds

    async def _run(self) -> None:
        asking = asyncio.create_task(self._ask_runtime())  # the runtime may reply late or never, which delays no round
        round_s, check_s, late_s = 0.0, 0.0, math.inf
        try:
            while self._waiters:
                began_s = time.monotonic()
                if began_s >= min(round_s, late_s):
                    round_s = await self._try_round(began_s, began_s > late_s) + time.monotonic()
                if began_s >= check_s and self.trouble is None:
                    await self._check_silence(began_s)
                    check_s = began_s + CHECK_S
                now_s = time.monotonic()
                pause_s = min(max(0.0, round_s - now_s), max(CHECK_S, self._interval_s))
                late_s = now_s + pause_s + LATE_S
                await asyncio.sleep(pause_s)
        finally:
            asking.cancel()

    async def _try_round(self, began_s: float, late: bool) -> float:
        """Make one round. Returns the pause until the next one."""
        unseen = late or self.trouble is not None
        self._pages = self._heads = 0
        try:
            blind = await self._round(began_s)
        except Exception as e:  # the rollouts in flight need the next round after any error
            self._failures, self.trouble = self._failures + 1, e
            level = logging.WARNING if self._failures in (1, 10, 100) else logging.DEBUG
            text = "listing the results under %s failed (%d in a row): %s"
            logger.log(level, text, self._root, self._failures, e, exc_info=not isinstance(e, AgentCoreRLError))
            if isinstance(e, StoreError) and e.permanent and not isinstance(e, StorePermissionError):
                for waiter in list(self._waiters.values()):
                    each = copy.copy(e)  # it gets the ids of its rollout
                    each.__cause__ = e.__cause__
                    self._settle(waiter, each)
            return backoff_s(self._failures, first_s=max(0.1, self._interval_s), most_s=LONGEST_PAUSE_S)
        self._failures, self.trouble = 0, None
        now_s = time.monotonic()
        for waiter in self._waiters.values() if unseen or now_s - began_s > LOOK_TIMEOUT_S else blind:
            waiter.stamp_changed_s = now_s  # its agent may not have been able to show life either
        return max(self._interval_s, self._pages * self._cost.list_s + self._heads * self._cost.head_s)

    async def _round(self, began_s: float) -> Mapping[Waiter, Exception]:
        """Look at all rollouts. Return those that could not be looked at. Raises: the error, if these are all."""
        blind: dict[Waiter, Exception] = {}
        if began_s >= self._keys_until_s:
            inputs = {waiter.prefix for waiter in self._waiters.values()}
            pages = max(1, math.ceil(self._lines / self._cost.page))
            whole = pages < len(inputs) and self._failures < 2  # otherwise it may be too long to be listed in time
            failed = await self._each(self._list, [self._root] if whole else sorted(inputs))
            for waiter in self._waiters.values():
                for place in failed.keys() & {waiter.prefix, self._root}:
                    blind[waiter] = failed[place]
            for error in failed.values():
                if isinstance(error, StorePermissionError) or not isinstance(error, StoreError):
                    level = logging.WARNING if self._keys_until_s == -math.inf else logging.DEBUG
                    self._keys_until_s = began_s + UNLISTABLE_S
                    logger.log(level, "%s cannot be listed (%r); single keys are requested instead", self._root, error)
                    break
        if began_s < self._keys_until_s:
            blind = await self._each(self._look_at, list(self._waiters.values()))
        if blind and len(blind) >= len(self._waiters):
            raise next(iter(blind.values()))
        return blind

    async def _each(self, look: Callable[[Any], Awaitable[object]], places: Iterable[Any]) -> dict[Any, Exception]:
        """Look at each of these places. Returns those for which that failed, with the error."""
        gate = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(place: Any) -> None:
            async with gate:
                await look(place)

        listed = list(places)
        ends = await asyncio.gather(*map(one, listed), return_exceptions=True)
        return {place: end for place, end in zip(listed, ends, strict=True) if isinstance(end, Exception)}

    async def _list(self, prefix: str) -> None:
        listed = await self._store.list_async(prefix, timeout_s=LOOK_TIMEOUT_S)
        self.requests += max(1, math.ceil(len(listed) / 1000))
        self._pages += max(1, math.ceil(len(listed) / self._cost.page))
        if prefix == self._root:
            self._lines = len(listed)
        for item in listed:
            if (waiter := self._waiters.get(item.key)) is not None:
                self._settle(waiter)
            elif item.key.endswith(ALIVE_SUFFIX):
                waiter = self._waiters.get(item.key.removesuffix(ALIVE_SUFFIX) + RECORD_SUFFIX)
                if waiter is not None:
                    self._sign_of_life(waiter, item)

    # ---- single rollouts

    async def _look_at(self, waiter: Waiter) -> bool:
        """Look at the keys of one. Returns True for its record, or another heartbeat than before."""
        if await self._head(waiter.key) is not None:
            self._settle(waiter)
            return True
        alive = await self._head(alive_key(waiter.key), seen=waiter.stamp is not None)
        return alive is not None and self._sign_of_life(waiter, alive)

    async def _head(self, key: str, *, seen: bool = False) -> ObjectInfo | None:
        self.requests += 1
        self._heads += 1
        try:
            return await self._store.head_async(key, timeout_s=LOOK_TIMEOUT_S)
        except ObjectNotFoundError:
            return None
        except StorePermissionError:
            if seen:  # access was lost, which shows nothing about the session
                raise
            return None  # S3 answers 403 for a missing key to callers that may not list

    def _sign_of_life(self, waiter: Waiter, item: ObjectInfo) -> bool:
        # Whole seconds, which is all that S3 has for a single object: reading it must not count as a change.
        stamp = (item.etag, item.last_modified.replace(microsecond=0) if item.etag else item.last_modified)
        if stamp == waiter.stamp:
            return False
        waiter.stamp, waiter.stamp_changed_s = stamp, time.monotonic()
        waiter.seen_life.set()
        return True

    def _settle(self, waiter: Waiter, error: Exception | None = None) -> None:
        """Resolve a waiter: its record exists, or an error ends it."""
        self.remove(waiter)
        waiter.seen_life.set()
        if waiter.found.done():
            return
        if error is None:
            waiter.found.set_result(True)
        else:
            waiter.found.set_exception(error)
            waiter.found.exception()  # asyncio complains about an error that nothing reads

    async def _check_silence(self, began_s: float) -> None:
        """Declare silent sessions lost, after one direct look at each of them."""

        async def check(waiter: Waiter) -> None:
            silent_s = began_s - waiter.stamp_changed_s
            if not await self._look_at(waiter):
                text = (
                    f"no sign of life for {silent_s:.0f} s and no record: the session died, or the agent stopped running or "
                    "writes to another place (local runtime: --store). Its log at the runtime has the cause"
                )
                self._settle(waiter, RolloutLostError(text, key=waiter.key))

        judged = [w for w in self._waiters.values() if w.expects_life or w.seen_life.is_set()]
        failed = await self._each(check, [w for w in judged if began_s - w.stamp_changed_s > w.silence_s])
        for waiter, error in failed.items():
            logger.debug("the last request for %s failed: %s", waiter.key, error)

    async def _ask_runtime(self) -> None:
        """Ask a local runtime again and again which of the sessions are over, and look for their records."""
        pause_s = ENDINGS_S
        while self._endings is not None:
            await asyncio.sleep(pause_s)
            waiting = {waiter.session_id: waiter for waiter in self._waiters.values()}
            try:
                found = await in_thread(self._endings, list(waiting)[:MOST_ASKED])
            except Exception as e:
                pause_s = 10 * ENDINGS_S
                logger.debug("the runtime did not report how sessions ended: %s", e)
                continue
            if found is None:
                self._endings = None
                return
            pause_s, gone = ENDINGS_S, {waiting[name]: cause for name, cause in found.items() if name in waiting}
            await self._each(functools.partial(self._died, gone), gone)

    async def _died(self, gone: Mapping[Waiter, str], waiter: Waiter) -> None:
        # A session that has ended stores nothing more: without a record at the second look, it is lost.
        if await self._head(waiter.key) is not None:
            self._settle(waiter)
        elif waiter.ended:
            self._settle(waiter, RolloutLostError(f"{gone[waiter]}, and left no record", key=waiter.key))
        waiter.ended = True
