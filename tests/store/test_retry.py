"""Backoff arithmetic and the sync portal."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from agentcore_rl_toolkit.store.portal import run_sync
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


def test_the_portal_passes_results_and_errors_and_refuses_its_own_thread() -> None:
    async def fine() -> int:
        return 7

    async def broken() -> None:
        raise KeyError("x")

    async def inside() -> None:
        run_sync(fine())

    assert run_sync(fine()) == 7
    with pytest.raises(KeyError):
        run_sync(broken())
    with pytest.raises(RuntimeError, match="would wait for itself"):
        run_sync(inside())


def test_an_interrupted_wait_cancels_the_work() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def long() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    import signal

    def interrupt() -> None:
        started.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_sync(long())
    thread.join()
    assert cancelled.wait(10)
