"""Pace of requests, and the stops of sessions in the background.

AgentCore counts requests per second and new sessions per minute as separate quotas, per account, region and agent. A
pacer holds a bucket for each, plus one for stops. Buckets follow the generic cell rate algorithm: one number (the
theoretical arrival time of the next request) instead of a token count, so a reservation is O(1) and needs no timer. On
a refusal (429, 402) the rate halves, and recovers linearly while nothing is refused: the AIMD rule of TCP, which finds
an unknown quota and shares it fairly. Buckets and pacers never sleep: they return a delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ..logs import WarnsOnceAMinute
from .transport import CallError, Transport, in_thread, within

logger = logging.getLogger(__name__)

STOPS_AT_ONCE = 64  # at the default pace, stops of two seconds each keep up with it
# One halving answers one burst of refusals: requests sent before the halving took effect come back refused for about this long.
DECREASE_SPACING_S = 1.0
RECOVERY_S = 30.0  # a full rate is regained in this time after the last refusal
FLOOR_SHARE = 0.02  # never below one fiftieth of the limit, so that recovery is always probed


class RateBucket:
    """One rate limit with a burst allowance and adaptive back-off. Not thread-safe; `Pacer` locks it.

    Units: ``rate`` events per second, ``burst`` events (>= 1), all times in seconds of one monotonic clock.
    """

    def __init__(self, rate: float, burst: float = 1.0) -> None:
        self.limit = rate
        self.burst = max(1.0, burst)
        self._share = 1.0  # of the limit, lowered by refusals
        self._changed_at = float("-inf")
        self._due = float("-inf")  # theoretical arrival time of the next event

    def rate(self, now: float) -> float:
        """The rate in force: the limit, or less while recovering from refusals."""
        if self._share >= 1.0:
            return self.limit
        return self.limit * min(1.0, self._share + max(0.0, now - self._changed_at) / RECOVERY_S)

    def delay_s(self, now: float) -> float:
        """Seconds until an event would be allowed, without taking the slot."""
        return max(0.0, self._due - (self.burst - 1.0) / self.rate(now) - now)

    def take(self, now: float) -> None:
        """Use the next slot."""
        self._due = max(self._due, now) + 1.0 / self.rate(now)

    def refund(self, now: float) -> None:
        """Give one slot back: the event was refused, so it did not count."""
        self._due -= 1.0 / self.rate(now)

    def refused(self, now: float) -> None:
        """Halve the rate and drop the burst credit, at most once per `DECREASE_SPACING_S`."""
        if now - self._changed_at < DECREASE_SPACING_S:
            return
        self._share = max(FLOOR_SHARE, self.rate(now) / self.limit / 2)
        self._changed_at = now
        self._due = max(self._due, now + (self.burst - 1.0) / self.rate(now))


def backoff_s(failures: int, *, base_s: float = 0.5, cap_s: float = 20.0, jitter: float = 0.0) -> float:
    """Delay before the next try after `failures` failed ones: doubling, capped, shortened by `jitter` in [0, 1).

    `jitter` is passed in (a random number), so the function stays pure.
    """
    return float(min(cap_s, base_s * 2 ** min(failures - 1, 30))) * (1.0 - 0.5 * jitter)


@dataclass(eq=False)
class PaceLimits:
    """The limits of one client: invokes per second, as many stops, and new sessions per minute (None: not limited)."""

    tps: float
    sessions_per_minute: float | None


class Pacer:
    """The buckets of one agent, shared by every client of the process that talks to it. Thread-safe.

    When clients ask for different limits, the lowest wins: the quota belongs to the agent, not to the client.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a client that the collector finds leaves in the middle of anything
        self._members: weakref.WeakSet[PaceLimits] = weakref.WeakSet()
        self._invokes = RateBucket(1.0)
        self._stops = RateBucket(1.0)
        self._sessions: RateBucket | None = None

    def join(self, limits: PaceLimits) -> None:
        """Count `limits` in for as long as its owner keeps it."""
        with self._lock:
            self._members.add(limits)
            self._apply()

    def leave(self, limits: PaceLimits) -> None:
        """Count `limits` out."""
        with self._lock:
            self._members.discard(limits)
            self._apply()

    def _apply(self) -> None:
        members = list(self._members)
        if not members:
            return
        # A fifth of a second's worth may go at once: well inside a one-second window at the service, yet no fixed spacing.
        rate = min(m.tps for m in members)
        for bucket in (self._invokes, self._stops):
            bucket.limit, bucket.burst = rate, max(1.0, rate / 5)
        per_minute = [m.sessions_per_minute for m in members if m.sessions_per_minute is not None]
        if not per_minute:
            self._sessions = None
            return
        per_s = min(per_minute) / 60
        self._sessions = self._sessions or RateBucket(per_s)
        self._sessions.limit, self._sessions.burst = per_s, max(1.0, per_s)

    def try_start(self, now: float) -> float:
        """Take a slot for a new session if one is free. Returns 0.0 when taken, else seconds until it is worth asking again."""
        with self._lock:
            delay_s = self._invokes.delay_s(now)
            if self._sessions is not None:
                delay_s = max(delay_s, self._sessions.delay_s(now))
            if delay_s <= 0.0:
                self._invokes.take(now)
                if self._sessions is not None:
                    self._sessions.take(now)
            return delay_s

    def try_stop(self, now: float) -> float:
        """Take a slot for a stop request; same meaning as `try_start`."""
        with self._lock:
            delay_s = self._stops.delay_s(now)
            if delay_s <= 0.0:
                self._stops.take(now)
            return delay_s

    def start_refused(self, now: float) -> None:
        """The runtime answered 429 or 402 to an invoke."""
        with self._lock:
            self._invokes.refused(now)
            if self._sessions is not None:
                self._sessions.refund(now)

    def stop_refused(self, now: float) -> None:
        """The runtime answered 429 to a stop."""
        with self._lock:
            self._stops.refused(now)


_pacers: dict[tuple[str, str], Pacer] = {}  # process-wide on purpose: the quota is per agent, for all clients
_pacers_lock = threading.Lock()


def shared_pacer(agent_runtime_arn: str, endpoint_url: str | None) -> Pacer:
    """The process's pacer for an agent. The ARN names account, region and agent; another endpoint is another service."""
    with _pacers_lock:
        return _pacers.setdefault((agent_runtime_arn, endpoint_url or ""), Pacer())


async def take_turn(ask: Callable[[float], float]) -> None:
    """Wait until ``ask(now)`` of a pacer grants a slot. Asks at least once a second: other clients may change the pace."""
    while True:
        delay_s = ask(time.monotonic())
        if delay_s <= 0:
            return
        await asyncio.sleep(min(delay_s, 1.0))


class StopQueue:
    """The sessions of a client that have to be stopped. Lives on the client's loop.

    Attributes:
        left: sessions that are not known to be gone, in the order in which they came.
    """

    def __init__(self, transport: Transport, pacer: Pacer, stop_s: float) -> None:
        self._transport, self._pacer, self._stop_s = transport, pacer, stop_s
        self.left: dict[str, None] = {}
        self._gate = asyncio.Semaphore(STOPS_AT_ONCE)
        self._pace = asyncio.Lock()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._ended = asyncio.Event()  # set by each stop that ends
        self._hurry = asyncio.Event()
        self._stopped_s, self._given_up = 0.0, False  # time of the last stop that succeeded; whether one failed
        self._warnings = WarnsOnceAMinute(logger)

    def put(
        self, session_id: str, on_end: Callable[[bool], object], invoke: asyncio.Future[bytes] | None = None
    ) -> asyncio.Task[bool]:
        """Stop a session soon. If its invoke is still on the wire, wait for its end: the session might start after its stop.

        ``on_end(gone)`` is called afterwards: True when the session is known to be gone.
        """
        self.left[session_id] = None
        task = asyncio.create_task(self._run(session_id, on_end, invoke))
        self._tasks.add(task)
        return task

    async def drain(self) -> None:
        """Wait for all stops. Give up when one failed and none succeeded for `stop_s`: the pace may need longer for all."""
        self._stopped_s, self._given_up = time.monotonic(), False
        while self._tasks:
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_s / 2):
                    await self._ended.wait()
            quiet_s = time.monotonic() - self._stopped_s
            if quiet_s >= self._stop_s / 2:
                self._hurry.set()
            if quiet_s >= self._stop_s and self._given_up:
                return

    async def _run(
        self, session_id: str, on_end: Callable[[bool], object], invoke: asyncio.Future[bytes] | None
    ) -> bool:
        gone = False
        try:
            if invoke is not None:
                hurry = asyncio.ensure_future(self._hurry.wait())
                await asyncio.wait((invoke, hurry), return_when=asyncio.FIRST_COMPLETED)
                hurry.cancel()
            async with self._gate:
                answered = await self._stop(session_id)
            # With its invoke still on the wire the session may yet come up; a later process has to stop it again.
            gone = answered and (invoke is None or invoke.done())
        finally:
            if gone:
                self.left.pop(session_id, None)
                self._stopped_s = time.monotonic()
            self._given_up = self._given_up or not gone
            self._tasks.discard(asyncio.current_task())
            self._ended.set()
            on_end(gone)
        return gone

    async def _stop(self, session_id: str) -> bool:
        """Stop one session, with retries. Stopping twice does no harm. Returns False when it could not be stopped."""
        spent_s, failures = 0.0, 0  # without the waits for a turn
        while True:
            async with self._pace:
                await take_turn(self._pacer.try_stop)
            began_s = time.monotonic()
            try:
                await within(in_thread(self._transport.stop, session_id), self._stop_s - spent_s)
                return True
            except (CallError, TimeoutError) as e:
                if isinstance(e, CallError) and e.throttled:
                    self._pacer.stop_refused(time.monotonic())
                failures += 1
                pause_s = backoff_s(failures, base_s=0.25, cap_s=5.0, jitter=random.random())
                problem: Exception = e
            except Exception as e:  # refused for good
                pause_s, problem = self._stop_s, e
            spent_s += time.monotonic() - began_s + pause_s
            if spent_s > self._stop_s:
                ids = {"session_id": session_id}
                self._warnings.warning("session %s could not be stopped: %s", session_id, problem, extra=ids)
                return False
            await asyncio.sleep(pause_s)
