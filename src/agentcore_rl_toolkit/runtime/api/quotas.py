"""AgentCore's service quotas as profiles, and the buckets that hold them. Pure arithmetic: the caller brings the time.

Source: the AgentCore quotas page; `aws-2025` are the values of 2025, which many accounts still have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from ..wire import WireError


@dataclass(frozen=True, kw_only=True)
class QuotaProfile:
    """Limits of an account. None: no limit.

    ``tps``: requests per second for each agent and operation. ``new_sessions_per_minute``: per endpoint. ``max_sessions``:
    environments alive at once, over all agents.
    """

    name: str
    tps: float | None = None
    new_sessions_per_minute: float | None = None
    max_sessions: int | None = None


PROFILES = {
    p.name: p
    for p in (
        QuotaProfile(name="unlimited"),
        QuotaProfile(name="aws-2026", tps=200, new_sessions_per_minute=400, max_sessions=2_500),
        QuotaProfile(name="aws-2025", tps=25, new_sessions_per_minute=100, max_sessions=500),
    )
}
_BIG_REGIONS = {"us-east-1", "us-west-2"}


def profile(name: str, *, region: str = "us-west-2", **own: Any) -> QuotaProfile:
    """Return a named profile, in the size AWS gives the region. ``own`` values replace its values. Raises: ConfigError."""
    if name not in PROFILES:
        raise ConfigError(f"quota profile must be one of {', '.join(PROFILES)}; got {name!r}")
    chosen, changes = PROFILES[name], {field: value for field, value in own.items() if value is not None}
    if chosen.max_sessions is not None and region in _BIG_REGIONS:
        chosen = replace(chosen, max_sessions=2 * chosen.max_sessions)
    return replace(chosen, **changes)


class TokenBucket:
    """``rate_per_s`` on average, and a burst of one second's worth, at least 1. It starts full."""

    def __init__(self, rate_per_s: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self._burst = self._tokens = max(1.0, rate_per_s)
        self._at = now

    def take(self, now: float) -> bool:
        """Use one token. False when there is none."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self.rate_per_s)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Quotas:
    """The state of a profile. Every method takes ``now`` in seconds of one clock and raises WireError 429 or 402."""

    def __init__(self, chosen: QuotaProfile) -> None:
        self.profile = chosen
        self.refused: Counter[str] = Counter()  # the keys are AWS's error codes
        self._buckets: dict[tuple[str, ...], TokenBucket] = {}

    def request(self, operation: str, runtime_id: str, now: float) -> None:
        """Count a data-plane request. Raises: WireError 429."""
        self._take(("tps", runtime_id, operation), self.profile.tps, now)

    def new_session(self, runtime_id: str, endpoint: str, live: int, now: float) -> None:
        """Count a new session, while ``live`` exist. Raises: WireError 402, 429."""
        limit, per_minute = self.profile.max_sessions, self.profile.new_sessions_per_minute
        if limit is not None and live >= limit:
            raise self._refusal("ServiceQuotaExceededException", f"maxVms limit exceeded for account: {limit}")
        self._take(("new", runtime_id, endpoint), per_minute and per_minute / 60, now)

    def _take(self, key: tuple[str, ...], rate_per_s: float | None, now: float) -> None:
        if rate_per_s is not None and not self._buckets.setdefault(key, TokenBucket(rate_per_s, now)).take(now):
            raise self._refusal("ThrottlingException", "Rate exceeded")

    def _refusal(self, code: str, message: str) -> WireError:
        self.refused[code] += 1
        return WireError(code, message)
