"""The pace of requests to one agent.

AgentCore has a quota of requests per second and one of new sessions per minute, per account, region and agent. A pacer has a
bucket for each, and one for stops. Buckets follow the generic cell rate algorithm: their state is the theoretical arrival time of
the next request. A refusal (429, 402) halves the rate, which then recovers linearly, as in TCP. Nothing here sleeps.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable

# One halving answers one burst of refusals: requests sent before the halving took effect come back refused for about this long.
DECREASE_SPACING_S = 1.0
RECOVERY_S = 30.0  # a full rate is regained in this time after the last refusal
FLOOR_SHARE = 0.02  # never below one fiftieth of the limit, so that recovery is always probed


class RateBucket:
    """A rate limit with a burst allowance. Units: ``limit`` events per second, ``burst`` events (>= 1), seconds."""

    def __init__(self, limit: float, burst: float = 1.0) -> None:
        self.limit, self.burst = limit, burst
        self._share = 1.0  # share of the limit, lowered by refusals
        self._changed_s = -math.inf
        self._due_s = -math.inf  # theoretical arrival time of the next event

    def rate(self, now: float) -> float:
        """Return the rate in force: the limit, or less while recovering from refusals."""
        return self.limit * min(1.0, self._share + max(0.0, now - self._changed_s) / RECOVERY_S)

    def delay_s(self, now: float) -> float:
        """Return seconds until an event is allowed."""
        return max(0.0, self._due_s - (self.burst - 1.0) / self.rate(now) - now)

    def take(self, now: float) -> None:
        """Use the next slot."""
        self._due_s = max(self._due_s, now) + 1.0 / self.rate(now)

    def refused(self, now: float) -> None:
        """Halve the rate and drop the burst credit, at most once per `DECREASE_SPACING_S`."""
        if now - self._changed_s < DECREASE_SPACING_S:
            return
        self._share = max(FLOOR_SHARE, self.rate(now) / self.limit / 2)
        self._changed_s = now
        self._due_s = max(self._due_s, now + (self.burst - 1.0) / self.rate(now))


class Pacer:
    """The pace of one agent, shared by all clients of the process that call it. The lowest limits win. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a client inside any statement
        self._members: dict[object, tuple[float, float | None]] = {}
        self._invokes, self._stops, self._sessions = RateBucket(1.0), RateBucket(1.0), RateBucket(math.inf)

    def join(self, member: object, tps: float, sessions_per_minute: float | None) -> None:
        """Apply the limits of a client until it leaves: invokes per second, as many stops, and new sessions."""
        with self._lock:
            self._members[member] = (tps, sessions_per_minute)
            self._apply()

    def leave(self, member: object) -> None:
        """Apply the limits of a client no longer."""
        with self._lock:
            self._members.pop(member, None)
            self._apply()

    def _apply(self) -> None:
        if not self._members:
            return
        # A fifth of a second's worth may go at once: well inside a one-second window at the service, yet no fixed spacing.
        rate = min(tps for tps, _ in self._members.values())
        for bucket in (self._invokes, self._stops):
            bucket.limit, bucket.burst = rate, max(1.0, rate / 5)
        per_s = min((each for _, each in self._members.values() if each is not None), default=math.inf) / 60
        self._sessions.limit, self._sessions.burst = per_s, max(1.0, per_s) if per_s < math.inf else 1.0

    def try_start(self, now: float) -> float:
        """Take a slot for a new session. Returns 0.0 if there was one, otherwise the seconds to wait before the next try."""
        return self._take(now, self._invokes, self._sessions)

    def try_stop(self, now: float) -> float:
        """Take a slot for a stop, as `try_start`."""
        return self._take(now, self._stops)

    def _take(self, now: float, *buckets: RateBucket) -> float:
        with self._lock:
            delay_s = max(bucket.delay_s(now) for bucket in buckets)
            if delay_s <= 0.0:
                for bucket in buckets:
                    bucket.take(now)
            return delay_s

    def start_refused(self, now: float) -> None:
        """Slow down after a 429 or 402 to an invoke."""
        with self._lock:
            self._invokes.refused(now)

    def stop_refused(self, now: float) -> None:
        """Slow down after a 429 to a stop."""
        with self._lock:
            self._stops.refused(now)


_pacers: dict[tuple[int, str, str | None], Pacer] = {}  # one set per process: a thread of the parent may hold a lock


def shared_pacer(agent_runtime_arn: str, endpoint_url: str | None) -> Pacer:
    """Return this process's pacer of an agent at an endpoint. The quota is per agent."""
    return _pacers.setdefault((os.getpid(), agent_runtime_arn, endpoint_url), Pacer())


async def take_turn(ask: Callable[[float], float]) -> None:
    """Wait until ``ask(now)`` of a pacer grants a slot. Asks at least once per second: other clients may change the pace."""
    delay_s = ask(time.monotonic())
    while delay_s > 0:
        await asyncio.sleep(min(delay_s, 1.0))
        delay_s = ask(time.monotonic())
