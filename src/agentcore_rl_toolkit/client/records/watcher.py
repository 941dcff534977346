"""Notices finished rollouts by looking at the store in bulk.

Theory of operation. Every rollout in flight leaves two keys under ``{exp_id}/{input_id}/``: a record when it ends, and
until then a heartbeat object that is rewritten periodically. One watcher serves all rollouts of an experiment. In each
round it looks at the store in the cheapest of three ways, by an estimate from what earlier rounds saw:

- one LIST of the experiment, when most of what it returns is of interest;
- one LIST per input with something in flight, when the experiment holds many finished objects;
- one HEAD per rollout in flight, when even single inputs hold thousands (and always when listing is not permitted).

A record seen resolves its waiter. A heartbeat that changes is a sign of life; only *changes* count, timed by our own
clock, so the clocks of store and client need not agree. Whether a session's silence means anything is a property of that
session alone: its agent promised a heartbeat in its answer to the invoke, or its own heartbeat was seen. Such a session is
declared lost when it shows none for its `silence_s`, after one last direct look for its record and its heartbeat. Silence ends
with the beginning of a look, because what happened since then it may not show, and is counted in time in which this process
looked (`look_clock`): a machine too busy to look is as a rule too busy for its agents. A local runtime says at once that a
session is over (`endings`); then the look for its record comes at once too.

The watcher never dies. What cannot be listed is looked at key by key, a rollout that could not be looked at is not judged,
and faults of the store delay rounds and fail nobody. Whatever else goes wrong is logged with its traceback, counted, and
followed by another round. A pushed notification leads to a direct look at one key; the store stays the only source of truth.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from ...contract import ALIVE_SUFFIX, RECORD_SUFFIX
from ...errors import ObjectNotFoundError, RolloutLostError, StoreError, StorePermissionError, UnlistableError
from ..data_plane.pacing import backoff_s
from .look_clock import LookClock

logger = logging.getLogger(__name__)

CPU_SHARE = 0.1  # looking at a local store may use this share of a core
LOCAL_CALL_S, LOCAL_OBJECT_S = 0.2e-3, 8e-6  # CPU of one call and of one line of a listing, measured on a directory
IDLE_SHARE = 0.05  # after t seconds without news, look every 5 % of t: news is late by at most that share of a rollout
REQUESTS_AT_ONCE = 32
LOOK_TIMEOUT_S = 15.0  # one look; a store that is down longer shows in the log and is asked again
UNLISTABLE_S = 60.0  # what cannot be listed is looked at key by key for so long, then listed again
LONGEST_PAUSE_S = 5.0  # between two rounds that failed


class Listed(Protocol):
    """One line of a listing."""

    @property
    def key(self) -> str: ...
    @property
    def last_modified(self) -> datetime: ...
    @property
    def etag(self) -> str | None: ...


class WatchedStore(Protocol):
    """What watching needs of a store."""

    async def list_async(
        self, prefix: str = "", after: str | None = None, *, timeout_s: float | None = ...
    ) -> Sequence[Listed]: ...
    async def head_async(self, key: str, *, timeout_s: float | None = ...) -> Listed: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """One rollout in flight. ``found`` ends with True when the record exists, or with RolloutLostError."""

    key: str
    prefix: str  # of its input, with the final slash
    found: asyncio.Future[bool]
    expects_life: bool  # its agent promised heartbeats for this session
    silence_s: float  # without a new sign of life for this long, it is lost
    seen_life: asyncio.Event = field(default_factory=asyncio.Event)
    stamp: object = None  # of the heartbeat when last seen
    stamp_changed_s: float = 0.0  # by the watcher's clock
    ended: bool = False  # its session is known to be gone; its record was looked for once since


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Relative cost of looking: one per request, plus `per_object` for each line of a listing. Pages hold 1,000."""

    per_object: float

    def listing(self, objects: int) -> float:
        return max(1, math.ceil(objects / 1000)) + objects * self.per_object


REMOTE_COST = CostModel(per_object=0.0005)
LOCAL_COST = CostModel(per_object=0.02)  # a stat of each file against a call of about 0.2 ms


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one round does: LIST these prefixes, or (None) HEAD each key."""

    prefixes: tuple[str, ...] | None


def choose_plan(
    root: str, in_flight: dict[str, int], known_objects: dict[str, int], cost: CostModel, *, may_list: bool
) -> Plan:
    """Pick the cheapest way to look.

    Args:
        root: prefix of the experiment.
        in_flight: input prefix -> rollouts in flight under it.
        known_objects: prefix -> objects that its last listing returned; prefixes not listed yet are absent.
    """
    if not may_list:
        return Plan(prefixes=None)
    flying = sum(in_flight.values())
    by_input = sum(cost.listing(known_objects.get(prefix, 2 * n)) for prefix, n in in_flight.items())
    at_least = sum(known_objects.get(prefix, n) for prefix, n in in_flight.items())
    whole = cost.listing(max(known_objects.get(root, 0), at_least))
    # A HEAD shows no heartbeat, so it must look twice per rollout; listings win ties.
    each = 2.0 * flying
    best = min(whole, by_input, each)
    if by_input == best:
        return Plan(prefixes=tuple(in_flight))
    return Plan(prefixes=(root,)) if whole == best else Plan(prefixes=None)


def round_interval_s(*, idle_s: float, round_cost_s: float, min_s: float, max_s: float) -> float:
    """Seconds until the next look: soon after news, later when nothing happens, never more than `CPU_SHARE` of the time."""
    return min(max_s, max(min_s, idle_s * IDLE_SHARE, round_cost_s / CPU_SHARE))


@dataclass(kw_only=True)
class LookPace:
    """How often to look. Units: seconds. ``push_works``: notifications arrive, so looking is only for what gets lost."""

    min_s: float
    max_s: float
    push_s: float
    push_works: bool = False

    def interval_s(self, *, idle_s: float, round_cost_s: float) -> float:
        least_s, most_s = self.min_s, self.max_s
        if self.push_works:
            least_s, most_s = self.push_s, max(self.max_s, self.push_s)
        return round_interval_s(idle_s=idle_s, round_cost_s=round_cost_s, min_s=least_s, max_s=most_s)


class Looks:
    """What looking at a store costs: requests since the start, calls and lines of the round under way."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.requests = 0
        self._calls = self._lines = 0

    def begin(self) -> None:
        """A round begins."""
        self._calls = self._lines = 0

    def asked(self) -> None:
        """One object was asked for."""
        self.requests += 1
        self._calls += 1

    def listed(self, lines: int) -> None:
        """A prefix was listed."""
        self.requests += max(1, math.ceil(lines / 1000))
        self._calls += 1
        self._lines += lines

    def round_cost_s(self) -> float:
        """CPU time of the last look at a local store, from counts: its wall time would grow with the load of the machine."""
        if self.cost is not LOCAL_COST:
            return 0.0
        return self._calls * LOCAL_CALL_S + self._lines * LOCAL_OBJECT_S


class Watcher:
    """Watches the rollouts of one experiment in one store. Lives on the engine's loop."""

    def __init__(
        self,
        store: WatchedStore,
        root: str,
        *,
        local: bool,
        min_s: float,
        max_s: float,
        push_s: float,
        on_trouble: Callable[[], object] = lambda: None,
        on_round: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._root = root
        self._looks = Looks(LOCAL_COST if local else REMOTE_COST)
        self._pace = LookPace(min_s=min_s, max_s=max_s, push_s=push_s)
        self._waiters: dict[str, Waiter] = {}
        self._by_alive: dict[str, Waiter] = {}
        self._known: dict[str, int] = {}
        self._may_list = True
        self._unlistable_s: dict[str, float] = {}  # prefix -> when its listing last failed for good
        self._news_at_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._outage = False
        self._failures = 0  # rounds that failed in a row
        self.trouble: Exception | None = None  # what the last of them failed with
        self._partly = 0  # rounds in a row in which some rollouts could not be looked at
        self._on_trouble, self._on_round = on_trouble, on_round
        self._clock = LookClock()
        self._look_s = 0.0  # by the clock: when the round under way began

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def requests(self) -> int:
        """Requests to the store so far."""
        return self._looks.requests

    def add(self, key: str, *, expects_life: bool, silence_s: float) -> Waiter:
        """Start looking for a record."""
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter = Waiter(key, key.rpartition("/")[0] + "/", found, expects_life, silence_s)
        self._news_at_s = time.monotonic()
        waiter.stamp_changed_s = self._now_s()
        self._waiters[key] = waiter
        self._by_alive[key.removesuffix(RECORD_SUFFIX) + ALIVE_SUFFIX] = waiter
        if self._task is None or self._task.done():
            self._start()
        return waiter

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task is over: rightly, with nobody left to watch for, or it is started again."""
        error = None if task.cancelled() else task.exception()
        if self._closed or task is not self._task or (error is None and not self._waiters):
            return
        self._failures += 1
        logger.error("watching %s ended unexpectedly and starts again", self._root, exc_info=error)
        self._on_trouble()
        loop = asyncio.get_running_loop()

        def again() -> None:
            if not self._closed and task is self._task and self._waiters:
                self._start()

        loop.call_later(self._pause_s(), again)

    def remove(self, waiter: Waiter) -> None:
        """Stop looking for a record."""
        if self._waiters.get(waiter.key) is waiter:
            del self._waiters[waiter.key]
            self._by_alive.pop(waiter.key.removesuffix(RECORD_SUFFIX) + ALIVE_SUFFIX, None)

    def pushed(self, waiter: Waiter) -> None:
        """A notification says that the record is there. The read that follows finds out."""
        self._settle(waiter)

    def push_was_true(self) -> None:
        """A notification led to a record: agents here do tell, so looking is only for what gets lost on the way."""
        self._pace.push_works = True

    def missing(self, waiter: Waiter) -> Waiter:
        """A read found no record after all: look on."""
        return self.add(waiter.key, expects_life=waiter.expects_life, silence_s=waiter.silence_s)

    async def look_now(self, waiter: Waiter) -> None:
        """One direct look at a rollout, however soon the next round is. A fault of the store shows nothing."""
        try:
            await self._look_at(waiter)
        except Exception as e:
            logger.debug("the direct look at %s failed: %s", waiter.key, e)

    async def died(self, waiter: Waiter, why: str) -> None:
        """Its session is over and stores nothing more. The first time its record is looked for; the second time it is lost.

        In between whoever takes records from sessions finishes what is under way.
        """
        if waiter.found.done() or self._waiters.get(waiter.key) is not waiter:
            return
        try:
            if await self._exists(waiter.key):
                self._settle(waiter)
                return
        except Exception as e:
            logger.debug("the look at %s after its session ended failed: %s", waiter.key, e)
            return
        if not waiter.ended:
            waiter.ended = True
        elif not waiter.found.done():
            self._lose(waiter, RolloutLostError(f"{why}, and left no record", key=waiter.key))

    def _lose(self, waiter: Waiter, error: RolloutLostError) -> None:
        self.remove(waiter)
        if not waiter.found.done():
            waiter.found.set_exception(error)
            waiter.found.exception()  # looked at, or asyncio complains where the follower was given up meanwhile

    def _settle(self, waiter: Waiter) -> None:
        self.remove(waiter)
        self._news_at_s = time.monotonic()
        if not waiter.found.done():
            waiter.found.set_result(True)

    def _now_s(self) -> float:
        return self._clock.at(time.monotonic())

    async def _run(self) -> None:
        pause_s = 0.0
        self._clock.rest()
        while self._waiters:
            self._looks.begin()
            self._clock.look(time.monotonic(), pause_s)
            self._look_s = self._now_s()
            try:
                await self._round()
                self._failures, self.trouble = 0, None
            except StoreError as e:
                self._failed(e)
                self._outage = True
            except Exception as e:  # whatever it is, the rollouts in flight need someone who looks
                self._failed(e)
                self._outage = True
                self._on_trouble()
            pause_s = self._pause_s() if self._failures else self._interval_s()
            await asyncio.sleep(pause_s)

    def _interval_s(self) -> float:
        idle_s = time.monotonic() - self._news_at_s
        interval_s = self._pace.interval_s(idle_s=idle_s, round_cost_s=self._looks.round_cost_s())
        return min(interval_s, min((w.silence_s for w in self._waiters.values()), default=math.inf) / 3)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.trouble = error
        level = logging.WARNING if self._failures in (1, 10, 100) else logging.DEBUG
        text = "looking for results under %s failed (%d in a row): %s"
        foreseen = isinstance(error, StoreError)
        logger.log(
            level if foreseen else max(level, logging.INFO),
            text,
            self._root,
            self._failures,
            error,
            exc_info=not foreseen,
        )

    def _pause_s(self) -> float:
        return backoff_s(self._failures, base_s=max(0.1, self._pace.min_s), cap_s=LONGEST_PAUSE_S)

    async def _round(self) -> None:
        in_flight: dict[str, int] = {}
        for waiter in self._waiters.values():
            in_flight[waiter.prefix] = in_flight.get(waiter.prefix, 0) + 1
        for prefix in [p for p in self._known if p != self._root and p not in in_flight]:
            del self._known[prefix]
        for prefix in [p for p in self._unlistable_s if p != self._root and p not in in_flight]:
            del self._unlistable_s[prefix]
        plan = choose_plan(self._root, in_flight, self._known, self._looks.cost, may_list=self._may_list)
        if plan.prefixes is None:
            blind = await self._look_at_each(list(self._waiters.values()))
        else:
            blind = await self._list_what_can_be(plan.prefixes, in_flight)
        now_s = self._now_s()
        problem = next(iter(blind.values()), None)
        if problem is not None and len(blind) >= len(self._waiters):
            raise problem
        self._report_partly(blind, problem)
        for waiter in self._waiters.values() if self._outage else blind:
            # Nothing could be seen of it, and its agent may not have been able to show life either: silence counts from now.
            waiter.stamp_changed_s = now_s
        self._outage = False
        self._on_round()
        await self._declare_lost()

    def _report_partly(self, blind: Collection[Waiter], problem: Exception | None) -> None:
        self._partly = self._partly + 1 if blind else 0
        if self._partly in (1, 10, 100):
            text = "%d of the rollouts under %s could not be looked at (%d rounds in a row); the others are: %s"
            logger.warning(text, len(blind), self._root, self._partly, problem)

    async def _list_what_can_be(self, prefixes: Sequence[str], in_flight: Mapping[str, int]) -> dict[Waiter, Exception]:
        """List these prefixes, or where they cannot be listed what lies below. Returns whom that did not show, and why."""
        if self._is_unlistable(self._root):
            prefixes = tuple(in_flight)
        single = [prefix for prefix in prefixes if self._is_unlistable(prefix)]
        failed = await self._list_all([prefix for prefix in prefixes if prefix not in single])
        blind: dict[Waiter, Exception] = {}
        for prefix, problem in failed.items():
            refused = isinstance(problem, StorePermissionError)
            if refused and len(failed) == len(prefixes) and (prefix == self._root or len(prefixes) > 1):
                logger.warning("listing %s is not permitted (%s); looking at single keys instead", self._root, problem)
                self._may_list = False
                single.append(prefix)
            elif isinstance(problem, StoreError) and not isinstance(problem, StorePermissionError | UnlistableError):
                blind.update(dict.fromkeys(self._below([prefix]), problem))
            else:
                self._cannot_list(prefix, problem)
                single.append(prefix)
        if single:
            blind.update(await self._look_at_each(self._below(single)))
        return blind

    def _cannot_list(self, prefix: str, problem: Exception) -> None:
        level = logging.DEBUG if prefix in self._unlistable_s else logging.WARNING
        unforeseen = None if isinstance(problem, StoreError) else problem
        text = "%s cannot be listed (%s); looking at single keys instead"
        logger.log(level, text, prefix, problem, exc_info=unforeseen)
        self._unlistable_s[prefix] = time.monotonic()
        if unforeseen is not None:
            self._on_trouble()

    def _is_unlistable(self, prefix: str) -> bool:
        return time.monotonic() - self._unlistable_s.get(prefix, -math.inf) < UNLISTABLE_S

    def _below(self, prefixes: Collection[str]) -> list[Waiter]:
        if self._root in prefixes:
            return list(self._waiters.values())
        return [waiter for waiter in self._waiters.values() if waiter.prefix in prefixes]

    async def _list_all(self, prefixes: Sequence[str]) -> dict[str, Exception]:
        """List each of the prefixes to its end. Returns those that failed."""
        failed: dict[str, Exception] = {}
        gate = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(prefix: str) -> None:
            async with gate:
                try:
                    await self._list(prefix)
                except Exception as e:  # of one prefix: the others are listed all the same
                    failed[prefix] = e

        if self._looks.cost is LOCAL_COST or len(prefixes) == 1:  # a local listing takes less time than a task
            for prefix in prefixes:
                await one(prefix)
            return failed
        await asyncio.gather(*(one(prefix) for prefix in prefixes))
        return failed

    async def _list(self, prefix: str) -> None:
        listed = await self._store.list_async(prefix, timeout_s=LOOK_TIMEOUT_S)
        for item in listed:
            self._note(item)
        self._known[prefix] = len(listed)
        self._looks.listed(len(listed))

    def _note(self, item: Listed) -> None:
        key = item.key
        if key.endswith(RECORD_SUFFIX):
            waiter = self._waiters.get(key)
            if waiter is not None:
                self._settle(waiter)
        elif key.endswith(ALIVE_SUFFIX):
            waiter = self._by_alive.get(key)
            if waiter is not None:
                self._sign_of_life(waiter, item)

    def _sign_of_life(self, waiter: Waiter, item: Listed) -> bool:
        # Whole seconds: S3 tells no more of a single object, and a look at it must not pass for a change.
        stamp = (item.etag, item.last_modified.replace(microsecond=0) if item.etag else item.last_modified)
        if stamp == waiter.stamp:
            return False
        waiter.stamp, waiter.stamp_changed_s = stamp, self._now_s()
        waiter.seen_life.set()
        return True

    async def _look_at_each(self, waiters: Sequence[Waiter]) -> dict[Waiter, Exception]:
        """Look at the keys of these. Returns whom that did not show, and why."""
        gate = asyncio.Semaphore(REQUESTS_AT_ONCE)
        blind: dict[Waiter, Exception] = {}

        async def look(waiter: Waiter) -> None:
            async with gate:
                try:
                    await self._look_at(waiter)
                except Exception as e:  # of one key: the others are looked at all the same
                    blind[waiter] = e

        await asyncio.gather(*(look(waiter) for waiter in waiters))
        return blind

    async def _head(self, key: str) -> Listed | None:
        self._looks.asked()
        try:
            return await self._store.head_async(key, timeout_s=LOOK_TIMEOUT_S)
        except (ObjectNotFoundError, StorePermissionError):
            return None  # S3 says 403 for a missing key to callers that may not list: not there yet

    async def _exists(self, key: str) -> bool:
        return await self._head(key) is not None

    async def _look_at(self, waiter: Waiter) -> bool:
        """Look at the keys of one. Whether there was news: its record, or another heartbeat than before."""
        if await self._exists(waiter.key):
            self._settle(waiter)
            return True
        alive = await self._head(waiter.key.removesuffix(RECORD_SUFFIX) + ALIVE_SUFFIX)
        return alive is not None and self._sign_of_life(waiter, alive)

    async def _declare_lost(self) -> None:
        for waiter in list(self._waiters.values()):
            silent_s = self._look_s - waiter.stamp_changed_s
            if silent_s <= waiter.silence_s or not (waiter.expects_life or waiter.seen_life.is_set()):
                continue
            try:
                if await self._look_at(waiter):
                    continue
            except Exception as e:
                logger.debug("the last look at %s failed: %s", waiter.key, e)
                continue
            self._lose(waiter, _lost(waiter, silent_s))

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()


def _lost(waiter: Waiter, silent_s: float) -> RolloutLostError:
    if waiter.seen_life.is_set():
        why = "the session died, or the agent stopped running"
    else:  # its agent promised some, and in most cases keeps the promise, elsewhere
        why = (
            "the session died at once, or its agent writes elsewhere: to another endpoint, or to a directory that is private "
            "to the session (local runtime: --writable)"
        )
    return RolloutLostError(
        f"no sign of life for {silent_s:.0f} s and no record: {why}. Its log at the runtime says which", key=waiter.key
    )
