"""Backoff arithmetic."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.store.retry import RetryPolicy, jitter


def test_delays_double_up_to_a_ceiling_and_jitter_spreads_them() -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=5.0)
    assert [round(policy.delay_s(n, 1.0), 3) for n in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.8]
    assert policy.delay_s(50, 1.0) == 5.0
    assert policy.delay_s(10_000, 1.0) == 5.0
    assert policy.delay_s(3, 0.0) == pytest.approx(0.1)


def test_larger_bodies_get_longer_tries() -> None:
    policy = RetryPolicy(attempt_s=20, bytes_per_s=1e6)
    assert policy.attempt_limit_s(0) == 20
    assert policy.attempt_limit_s(100_000_000) == 120


def test_jitter_is_a_fraction_and_does_not_come_from_the_shared_generator() -> None:
    import random

    random.seed(1)
    first = [jitter() for _ in range(100)]
    random.seed(1)
    assert first != [jitter() for _ in range(100)]
    assert all(0 <= f < 1 for f in first)
