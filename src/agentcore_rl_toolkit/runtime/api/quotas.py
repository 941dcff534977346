"""AgentCore's service quotas as profiles, and the buckets that hold them. Pure arithmetic: the caller brings the time.

Source: the AgentCore quotas page; `aws-2025` are the values of 2025, which many accounts still have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...errors import ConfigError
from ..wire import WireError

CONTROL_WRITE = ("Create", "Update", "Delete", "List")


@dataclass(frozen=True, kw_only=True)
class QuotaProfile:
    """Limits of an account. None: no limit.

    ``tps``: requests per second per agent, by operation (`*` for any other). ``new_sessions_per_minute``: per endpoint, of
    agents that are images. ``max_sessions``: environments alive at once, over all agents. ``control_tps``: by the first word of
    the operation.
    """

    name: str
    tps: Mapping[str, float] = field(default_factory=dict)
    new_sessions_per_minute: float | None = None
    max_sessions: int | None = None
    control_tps: Mapping[str, float] = field(default_factory=dict)


_CONTROL = {**dict.fromkeys(CONTROL_WRITE, 5.0), "Get": 50.0}
PROFILES = {
    p.name: p
    for p in (
        QuotaProfile(name="unlimited"),
        QuotaProfile(
            name="aws-2026",
            tps={"*": 200.0},
            new_sessions_per_minute=400,
            max_sessions=2_500,
            control_tps=_CONTROL,
        ),
        QuotaProfile(
            name="aws-2025",
            tps={"*": 25.0},
            new_sessions_per_minute=100,
            max_sessions=500,
            control_tps=_CONTROL,
        ),
    )
}
_BIG_REGIONS = {"us-east-1", "us-west-2"}


def profile(
    name: str,
    *,
    region: str = "us-west-2",
    tps: float | None = None,
    new_sessions_per_minute: float | None = None,
    max_sessions: int | None = None,
) -> QuotaProfile:
    """A named profile, in the size AWS gives the region, with single values replaced. Raises: ConfigError."""
    for option, value in (
        ("tps", tps),
        ("new-sessions-per-minute", new_sessions_per_minute),
        ("max-sessions", max_sessions),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option} must be above 0, got {value!r}; leave it out for the profile's own")
    if name not in PROFILES:
        raise ConfigError(f"quota profile must be one of {', '.join(PROFILES)}; got {name!r}")
    chosen = PROFILES[name]
    if chosen.max_sessions is not None and region in _BIG_REGIONS:
        chosen = replace(chosen, max_sessions=2 * chosen.max_sessions)
    if tps is not None:
        chosen = replace(chosen, tps={"*": tps})
    if new_sessions_per_minute is not None:
        chosen = replace(chosen, new_sessions_per_minute=new_sessions_per_minute)
    if max_sessions is not None:
        chosen = replace(chosen, max_sessions=max_sessions)
    return chosen


class TokenBucket:
    """``rate_per_s`` on average, bursts up to ``burst``; starts full."""

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self.burst = max(1.0, burst)
        self._tokens = self.burst
        self._at = now

    def take(self, now: float) -> bool:
        """Use one token; False when there is none."""
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate_per_s)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Quotas:
    """The state behind a profile. Every method takes ``now`` in seconds of one clock and raises WireError 429 or 402."""

    def __init__(self, chosen: QuotaProfile) -> None:
        self.profile = chosen
        self._buckets: dict[tuple[str, ...], TokenBucket] = {}
        self.refused: dict[str, int] = {}

    def request(self, operation: str, runtime_id: str, now: float) -> None:
        """A data-plane request. Raises: WireError 429."""
        rate = self.profile.tps.get(operation, self.profile.tps.get("*"))
        self._take(("tps", runtime_id, operation), rate, rate, now)

    def control(self, operation: str, now: float) -> None:
        """A control-plane request. Raises: WireError 429."""
        word = next((w for w in self.profile.control_tps if operation.startswith(w)), None)
        rate = None if word is None else self.profile.control_tps[word]
        self._take(("control", operation), rate, rate, now)

    def new_session(self, runtime_id: str, endpoint: str, live: int, now: float) -> None:
        """A session is to be started while ``live`` exist. Raises: WireError 402, 429."""
        limit = self.profile.max_sessions
        if limit is not None and live >= limit:
            self._count("ServiceQuotaExceededException")
            raise WireError("ServiceQuotaExceededException", f"maxVms limit exceeded for account: {limit}")
        per_minute = self.profile.new_sessions_per_minute
        if per_minute is not None:
            # One second's worth of burst: the quota is on a rate, and a minute's worth at once is refused on AWS too.
            self._take(("new", runtime_id, endpoint), per_minute / 60, max(1.0, per_minute / 60), now)

    def _take(self, key: tuple[str, ...], rate: float | None, burst: float | None, now: float) -> None:
        if rate is None or burst is None:
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(rate, burst, now)
        if not bucket.take(now):
            self._count("ThrottlingException")
            raise WireError("ThrottlingException", "Rate exceeded")

    def _count(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
