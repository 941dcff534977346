"""When a session has been idle for too long: pure arithmetic on times, no waiting.

Theory of operation. AWS counts a session as active while an invocation or a command runs, and while its /ping answers
HealthyBusy; otherwise it is idle. Its environment ends after ``idle_timeout_s`` of idleness, and after ``max_lifetime_s`` in any
case. AWS pings about every two seconds. Here a session is pinged only when the answer can matter: once a while
after its last activity, then as often as needed while it is busy, and right before its idle limit. A session that is stopped
soon after its invocation is never pinged.
"""

from __future__ import annotations

from dataclasses import dataclass

PING_MIN_S, PING_MAX_S = 2.0, 15.0  # 2 s is the platform's own pace; an idle limit is kept by AWS to within 15 s


@dataclass
class ActivityClock:
    """Times of one session, in seconds of one clock that the caller reads (`now`)."""

    born_s: float
    idle_timeout_s: float
    max_lifetime_s: float
    last_active_s: float = 0.0
    last_ping_s: float | None = None
    inflight: int = 0
    busy: bool = False
    last_answer: tuple[str, object] | None = None  # status and time of the last ping

    def __post_init__(self) -> None:
        self.last_active_s = self.born_s

    @property
    def ping_interval_s(self) -> float:
        return min(PING_MAX_S, max(PING_MIN_S, self.idle_timeout_s / 60))

    def begin(self, now: float) -> None:
        """An invocation or a command starts."""
        self.inflight += 1
        self.last_active_s = now

    def end(self, now: float) -> None:
        """An invocation or a command ended, or its caller went away and the agent finished it."""
        self.inflight -= 1
        self.last_active_s = now
        self.last_ping_s = None

    def saw_ping(self, status: str | None, now: float) -> None:
        """A ping was answered (status None: it was not)."""
        self.last_ping_s = now
        was_busy = self.busy
        self.busy = status == "HealthyBusy"
        if self.busy or was_busy:  # it was busy until some time since the last ping: count in the agent's favour
            self.last_active_s = now

    def verdict(self, now: float) -> str | None:
        """``max_lifetime`` or ``idle`` when the session must end now, else None."""
        if now >= self.born_s + self.max_lifetime_s:
            return "max_lifetime"
        # Never on an old answer: the agent may have become busy since.
        pinged = self.last_ping_s is not None and self.last_ping_s >= self.last_active_s + self.idle_timeout_s
        if self.inflight == 0 and not self.busy and pinged:
            return "idle"
        return None

    def next_check_s(self) -> float:
        """When to look next: ping then, and ask for a verdict."""
        end = self.born_s + self.max_lifetime_s
        if self.inflight:
            return end
        limit = self.last_active_s + self.idle_timeout_s
        if self.last_ping_s is None:
            return min(end, limit, self.last_active_s + self.ping_interval_s)
        if self.busy:
            return min(end, self.last_ping_s + self.ping_interval_s)
        return min(end, limit)
