"""Pace of requests: pure arithmetic on a given `now`, and the pacers that all clients of a process share.

AgentCore counts requests per second and new sessions per minute as separate quotas, per account, region and agent. A
pacer holds a bucket for each, plus one for stops. Buckets follow the generic cell rate algorithm: one number (the
theoretical arrival time of the next request) instead of a token count, so a reservation is O(1) and needs no timer. On
a refusal (429, 402) the rate halves, and recovers linearly while nothing is refused: the AIMD rule of TCP, which finds
an unknown quota and shares it fairly.

Nothing here sleeps. Callers get the delay in seconds and wait in their own way.
"""

from __future__ import annotations

import threading
import weakref

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


class PaceLimits:
    """The limits of one client: invokes per second, as many stops, and new sessions per minute (None: not limited)."""

    def __init__(self, tps: float, sessions_per_minute: float | None) -> None:
        self.tps = tps
        self.sessions_per_minute = sessions_per_minute


class Pacer:
    """The buckets of one agent, shared by every client of the process that talks to it. Thread-safe.

    When clients ask for different limits, the lowest wins: the quota belongs to the agent, not to the client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        elif self._sessions is None:
            self._sessions = RateBucket(min(per_minute) / 60, burst=min(per_minute) / 60)
        else:
            self._sessions.limit = min(per_minute) / 60
            self._sessions.burst = max(1.0, min(per_minute) / 60)

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
