"""Quota profiles and their buckets, without waiting."""

from __future__ import annotations

from collections.abc import Callable

from agentcore_rl_toolkit.runtime.api.quotas import Quotas, TokenBucket, profile
from agentcore_rl_toolkit.runtime.wire import WireError


def admitted(call: Callable[[], None], times: int) -> int:
    count = 0
    for _ in range(times):
        try:
            call()
            count += 1
        except WireError as e:
            if (e.code, e.status) != ("ThrottlingException", 429):
                raise
    return count


def test_bucket_refills_at_its_rate_up_to_its_burst() -> None:
    bucket = TokenBucket(rate_per_s=2.0, now=0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(0.4), bucket.take(0.6)] == [False, True]
    assert [bucket.take(100.0) for _ in range(3)] == [True, True, False]


def test_new_sessions_are_limited_per_endpoint_and_minute() -> None:
    q = Quotas(profile("aws-2026"))
    count = sum(admitted(lambda t=t: q.new_session("a", "DEFAULT", 0, t / 10), 1) for t in range(600))
    assert 400 <= count <= 407
    assert admitted(lambda: q.new_session("a", "other", 0, 60.0), 1) == 1
