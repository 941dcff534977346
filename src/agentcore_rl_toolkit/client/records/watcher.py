"""Notices finished rollouts by listing the store.

Theory of operation. Every rollout in flight leaves two keys under ``{exp_id}/{input_id}/``: a record when it ends, and
until then a heartbeat object that is rewritten periodically. One watcher serves all rollouts of an experiment. In each
round it lists the experiment, or each input with something in flight where that takes fewer requests.

A record seen resolves its waiter. A heartbeat that changes is a sign of life; only *changes* count, timed by our own
clock, so the clocks of store and client need not agree. Silence counts only for a session whose agent promised a heartbeat in
its answer to the invoke, or whose heartbeat was seen. Such a session is lost when it shows none for its `silence_s`, after one
last direct look for its record and its heartbeat. Silence is measured up to the beginning of a round, because the round may
miss later changes. It counts anew after a round that failed, or that came late because this process was stopped. A local
runtime is asked after a round which sessions are over; of those the watcher looks for the record at once.

Where listing is not permitted or not possible, the watcher reads the keys one by one. A rollout whose key could not be read is
not judged. Faults of the store delay rounds and fail no rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...contract import ALIVE_SUFFIX, RECORD_SUFFIX
from ...errors import AgentCoreRLError, ObjectNotFoundError, RolloutLostError, StoreError, StorePermissionError
from ...store import ObjectInfo, ObjectStore
from ..data_plane.pacing import backoff_s
from ..data_plane.transport import Ending, in_thread

logger = logging.getLogger(__name__)

LOCAL_INTERVAL_S, REMOTE_INTERVAL_S = 0.05, 0.5
REQUESTS_AT_ONCE = 32
LOOK_TIMEOUT_S = 15.0  # one look; a store that is down longer shows in the log and is asked again
UNLISTABLE_S = 60.0  # where listing fails for good, keys are looked at for so long, then it is tried again
LONGEST_PAUSE_S = 5.0  # between two rounds that failed
ENDINGS_S = 0.5  # between two questions to a local runtime; ten times as long after one that failed
MOST_ASKED = 5_000  # sessions in one question; a runtime takes twice as many
LATE_S = 2.0  # a round this late says that the process did not run, and as a rule its agents did not either


@dataclass(frozen=True, kw_only=True)
class ListingCost:
    """``page``: lines of a listing that cost as much as one more request. ``pause_s``: pause that each such page asks for."""

    page: int
    pause_s: float


REMOTE_COST = ListingCost(page=1000, pause_s=0.01)  # S3's own page; at most a hundred LISTs a second
# A call takes 0.2 ms of CPU and a line 8 µs, measured on a directory: looking takes a tenth of a core at most.
LOCAL_COST = ListingCost(page=25, pause_s=0.002)


@dataclass(slots=True, eq=False)
class Waiter:
    """One rollout in flight. ``found`` ends with True when the record exists, or with RolloutLostError."""

    key: str
    prefix: str  # of its input, with the final slash
    found: asyncio.Future[bool]
    expects_life: bool  # its agent promised heartbeats for this session
    silence_s: float  # without a new sign of life for this long, it is lost
    seen_life: asyncio.Event = field(default_factory=asyncio.Event)  # or its end
    stamp: object = None  # of the heartbeat when last seen
    stamp_changed_s: float = 0.0  # monotonic
    ended: bool = False  # its session is known to be gone; its record was looked for once since


class Watcher:
    """Watches the rollouts of one experiment in one store. Lives on the engine's loop.

    ``endings``: which of these sessions are over; None, or its answer: nothing here can say so.
    """

    def __init__(
        self,
        store: ObjectStore,
        root: str,
        *,
        interval_s: float,
        cost: ListingCost,
        endings: Callable[[Sequence[str]], Mapping[str, Ending] | None] | None = None,
    ) -> None:
        self._store = store
        self._endings, self._ask_at_s = endings, 0.0
        self._root = root
        self._interval_s, self._cost = interval_s, cost
        self._waiters: dict[str, Waiter] = {}
        self._by_alive: dict[str, Waiter] = {}
        self._lines = 0  # of the last listing of the whole experiment
        self._pages = 0  # listed in this round
        self._keys_until_s = -math.inf  # until then keys are looked at one by one
        self._unseen = False  # the last round failed or came late
        self._failures = 0  # rounds that failed in a row
        self._task: asyncio.Task[None] | None = None
        self.trouble: Exception | None = None  # what the last round failed with
        self.requests = 0

    def add(self, key: str, *, expects_life: bool, silence_s: float) -> Waiter:
        """Start looking for a record."""
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter = Waiter(key, key.rpartition("/")[0] + "/", found, expects_life, silence_s)
        waiter.stamp_changed_s = time.monotonic()
        self._waiters[key] = waiter
        self._by_alive[_alive(key)] = waiter
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Stop looking for a record."""
        if self._waiters.get(waiter.key) is waiter:
            del self._waiters[waiter.key]
            self._by_alive.pop(_alive(waiter.key), None)

    def missing(self, waiter: Waiter) -> Waiter:
        """A read found no record after all: look on."""
        return self.add(waiter.key, expects_life=waiter.expects_life, silence_s=waiter.silence_s)

    async def look_now(self, waiter: Waiter) -> None:
        """One direct look at a rollout, however soon the next round is. A fault of the store shows nothing."""
        try:
            await self._look_at(waiter)
        except Exception as e:
            logger.debug("the direct look at %s failed: %s", waiter.key, e)

    async def _ask(self, now_s: float) -> None:
        """Ask the runtime which of the sessions are over."""
        if self._endings is None or now_s < self._ask_at_s:
            return
        self._ask_at_s = now_s + ENDINGS_S
        waiting = {_session(key): waiter for key, waiter in self._waiters.items()}
        try:
            found = await in_thread(self._endings, list(waiting)[:MOST_ASKED])
        except Exception as e:  # it is asked again
            self._ask_at_s = time.monotonic() + 10 * ENDINGS_S
            logger.debug("the runtime did not say how sessions ended: %s", e)
            return
        if found is None:
            self._endings = None
        for name, ending in (found or {}).items():
            if ending.gone and name in waiting:
                await self._died(waiting[name], str(ending))

    async def _died(self, waiter: Waiter, why: str) -> None:
        """The waiter's session is over and stores nothing more. The second time this is said without a record, it is lost."""
        if waiter.found.done() or self._waiters.get(waiter.key) is not waiter:
            return
        try:
            if await self._head(waiter.key) is not None:
                self._settle(waiter)
                return
        except Exception as e:
            logger.debug("the look at %s after its session ended failed: %s", waiter.key, e)
            return
        if not waiter.ended:
            waiter.ended = True
        elif not waiter.found.done():
            self._lose(waiter, RolloutLostError(f"{why}, and left no record", key=waiter.key))

    def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    # ---- rounds

    async def _run(self) -> None:
        due_s = math.inf
        while self._waiters:
            began_s = time.monotonic()
            self._unseen = self._unseen or began_s > due_s + LATE_S
            try:
                await self._round(began_s)
                await self._ask(began_s)
                self._failures, self.trouble = 0, None
                pause_s = max(self._interval_s, self._pages * self._cost.pause_s)
            except Exception as e:  # whatever it is, the rollouts in flight need the next round
                self._failed(e)
                pause_s = backoff_s(self._failures, base_s=max(0.1, self._interval_s), cap_s=LONGEST_PAUSE_S)
            due_s = time.monotonic() + pause_s
            self._unseen = self._unseen or due_s - began_s > pause_s + LOOK_TIMEOUT_S
            await asyncio.sleep(pause_s)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._unseen = True
        self.trouble = error
        foreseen = isinstance(error, AgentCoreRLError)
        level = logging.WARNING if self._failures in (1, 10, 100) else logging.DEBUG
        text = "looking for results under %s failed (%d in a row): %s"
        logger.log(level, text, self._root, self._failures, error, exc_info=not foreseen)

    async def _round(self, began_s: float) -> None:
        self._pages = 0
        blind: dict[Any, Exception] = {}  # the rollouts that this round does not show, and why
        if began_s >= self._keys_until_s:
            inputs = {waiter.prefix for waiter in self._waiters.values()}
            whole = max(1, math.ceil(self._lines / self._cost.page))
            failed = await self._each(self._list, [self._root] if whole < len(inputs) else sorted(inputs))
            for waiter in self._waiters.values():
                for place in failed.keys() & {waiter.prefix, self._root}:
                    blind[waiter] = failed[place]
            for error in [e for e in failed.values() if not _may_pass(e)][:1]:
                self._list_no_more(error, began_s)
        if began_s < self._keys_until_s:
            blind = await self._each(self._look_at, list(self._waiters.values()))
        if blind and len(blind) >= len(self._waiters):
            raise next(iter(blind.values()))
        for waiter in self._waiters.values() if self._unseen else blind:
            waiter.stamp_changed_s = began_s  # its agent may not have been able to show life either
        self._unseen = False
        await self._declare_lost(began_s)

    async def _each(self, look: Callable[[Any], Awaitable[object]], places: Sequence[Any]) -> dict[Any, Exception]:
        """Look at each of these places. Returns those where that failed, and why."""
        gate = asyncio.Semaphore(REQUESTS_AT_ONCE)
        failed: dict[Any, Exception] = {}

        async def one(place: Any) -> None:
            async with gate:
                try:
                    await look(place)
                except Exception as e:  # of one place: the others are looked at all the same
                    failed[place] = e

        await asyncio.gather(*map(one, places))
        return failed

    def _list_no_more(self, error: Exception, now_s: float) -> None:
        level = logging.WARNING if self._keys_until_s == -math.inf else logging.DEBUG
        self._keys_until_s = now_s + UNLISTABLE_S
        text = "%s cannot be listed (%s); looking at single keys instead"
        logger.log(level, text, self._root, error, exc_info=None if isinstance(error, AgentCoreRLError) else error)

    async def _list(self, prefix: str) -> None:
        listed = await self._store.list_async(prefix, timeout_s=LOOK_TIMEOUT_S)
        self.requests += max(1, math.ceil(len(listed) / 1000))
        self._pages += max(1, math.ceil(len(listed) / self._cost.page))
        if prefix == self._root:
            self._lines = len(listed)
        for item in listed:
            if item.key.endswith(RECORD_SUFFIX):
                waiter = self._waiters.get(item.key)
                if waiter is not None:
                    self._settle(waiter)
            elif item.key.endswith(ALIVE_SUFFIX):
                waiter = self._by_alive.get(item.key)
                if waiter is not None:
                    self._sign_of_life(waiter, item)

    # ---- single rollouts

    async def _look_at(self, waiter: Waiter) -> bool:
        """Look at the keys of one. Whether there was news: its record, or another heartbeat than before."""
        if await self._head(waiter.key) is not None:
            self._settle(waiter)
            return True
        alive = await self._head(_alive(waiter.key))
        return alive is not None and self._sign_of_life(waiter, alive)

    async def _head(self, key: str) -> ObjectInfo | None:
        self.requests += 1
        try:
            return await self._store.head_async(key, timeout_s=LOOK_TIMEOUT_S)
        except (ObjectNotFoundError, StorePermissionError):
            return None  # S3 says 403 for a missing key to callers that may not list: not there yet

    def _sign_of_life(self, waiter: Waiter, item: ObjectInfo) -> bool:
        # Whole seconds: S3 tells no more of a single object, and a look at it must not pass for a change.
        stamp = (item.etag, item.last_modified.replace(microsecond=0) if item.etag else item.last_modified)
        if stamp == waiter.stamp:
            return False
        waiter.stamp, waiter.stamp_changed_s = stamp, time.monotonic()
        waiter.seen_life.set()
        return True

    def _settle(self, waiter: Waiter) -> None:
        self.remove(waiter)
        if not waiter.found.done():
            waiter.found.set_result(True)
            waiter.seen_life.set()

    def _lose(self, waiter: Waiter, error: RolloutLostError) -> None:
        self.remove(waiter)
        if not waiter.found.done():
            waiter.found.set_exception(error)
            waiter.seen_life.set()
            waiter.found.exception()  # looked at, or asyncio complains where the rollout was given up meanwhile

    async def _declare_lost(self, began_s: float) -> None:
        for waiter in list(self._waiters.values()):
            silent_s = began_s - waiter.stamp_changed_s
            if silent_s <= waiter.silence_s or not (waiter.expects_life or waiter.seen_life.is_set()):
                continue
            try:
                if await self._look_at(waiter):
                    continue
            except Exception as e:
                logger.debug("the last look at %s failed: %s", waiter.key, e)
                continue
            self._lose(waiter, _lost(waiter, silent_s))


def _alive(key: str) -> str:
    return key.removesuffix(RECORD_SUFFIX) + ALIVE_SUFFIX


def _session(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(RECORD_SUFFIX)


def _may_pass(error: Exception) -> bool:
    """Whether a listing may succeed next time; where not, keys are looked at instead."""
    return isinstance(error, StoreError) and not isinstance(error, StorePermissionError)


def _lost(waiter: Waiter, silent_s: float) -> RolloutLostError:
    if waiter.seen_life.is_set():
        why = "the session died, or the agent stopped running"
    else:  # its agent promised some, and in most cases keeps the promise, elsewhere
        why = (
            "the session died at once, or its agent writes elsewhere: to another endpoint, or to a directory that is private "
            "to the session (local runtime: --store)"
        )
    return RolloutLostError(
        f"no sign of life for {silent_s:.0f} s and no record: {why}. Its log at the runtime says which", key=waiter.key
    )
