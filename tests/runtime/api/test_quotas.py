"""Quota profiles and their buckets, without waiting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentcore_rl_toolkit.errors import ConfigError
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
    assert count == 406
    assert admitted(lambda: q.new_session("a", "other", 0, 60.0), 1) == 1


def test_live_sessions_are_limited_over_all_agents_and_refusals_counted() -> None:
    q = Quotas(profile("aws-2025", max_sessions=2))
    q.new_session("a", "DEFAULT", 1, 0.0)
    with pytest.raises(WireError, match="maxVms limit exceeded for account: 2") as error:
        q.new_session("b", "DEFAULT", 2, 1.0)
    assert (error.value.status, error.value.code) == (402, "ServiceQuotaExceededException")
    assert admitted(lambda: q.request("InvokeAgentRuntime", "a", 0.0), 30) == 25
    assert admitted(lambda: q.request("InvokeAgentRuntime", "b", 0.0), 1) == 1
    assert q.refused == {"ServiceQuotaExceededException": 1, "ThrottlingException": 5}


def test_big_regions_have_twice_the_sessions() -> None:
    assert profile("aws-2026").max_sessions == 5_000
    assert profile("aws-2026", region="eu-west-1").max_sessions == 2_500
    assert profile("aws-2026", max_sessions=7).max_sessions == 7
    assert profile("unlimited", tps=0.5).tps == 0.5
    with pytest.raises(ConfigError, match="one of unlimited, aws-2026, aws-2025"):
        profile("aws")
