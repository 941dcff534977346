"""Pace arithmetic, with a clock that the tests turn by hand."""

from __future__ import annotations

import bisect
import os
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.client.pacing import (
    DECREASE_SPACING_S,
    FLOOR_SHARE,
    RECOVERY_S,
    Pacer,
    RateBucket,
    shared_pacer,
    take_turn,
)


def admit(bucket: RateBucket, until_s: float) -> list[float]:
    """Times at which a greedy caller gets its slots, from 0 on."""
    now, times = 0.0, []
    while now <= until_s:
        delay_s = bucket.delay_s(now)
        if delay_s > 0:
            now += delay_s + 1e-9
            continue
        bucket.take(now)
        times.append(now)
    return times


@given(rate=st.floats(0.5, 200), burst=st.floats(1, 50))
def test_no_second_holds_more_than_rate_plus_burst(rate: float, burst: float) -> None:
    times = admit(RateBucket(rate, burst), 3.0)
    for n, start in enumerate(times):
        assert bisect.bisect_left(times, start + 1) - n <= rate + burst + 1


def test_refusal_halves_the_rate_once_per_burst_of_refusals_and_recovers() -> None:
    bucket = RateBucket(100, 10)
    for _ in range(20):
        bucket.refused(50.0)
    assert bucket.rate(50.0) == pytest.approx(50)
    bucket.refused(50.0 + DECREASE_SPACING_S)
    assert 25 < bucket.rate(50.0 + DECREASE_SPACING_S) < 30  # half of what was regained meanwhile
    assert bucket.rate(52.0 + 2 * RECOVERY_S) == 100


def test_sessions_per_minute_bind_when_lower_than_requests() -> None:
    pacer = Pacer()
    pacer.join("client", 100, 600)
    pacer.join("other", 100, None)
    assert sum(pacer.try_start(0.0) == 0 for _ in range(50)) == 10  # a second's worth at once
    assert pacer.try_start(0.0) == pytest.approx(0.1)
    pacer.join("client", 100, 30)
    assert [pacer.try_start(1000.0) for _ in range(2)] == pytest.approx([0.0, 2.0])


def test_a_refusal_drops_the_burst_and_the_rate_has_a_floor() -> None:
    bucket = RateBucket(10, 3)
    bucket.refused(100.0)
    delays_s = []
    for _ in range(3):
        delays_s.append(bucket.delay_s(100.0))
        bucket.take(100.0)
    assert delays_s == pytest.approx([0.0, 0.2, 0.4])
    for n in range(1, 50):
        bucket.refused(100.0 + n)
    assert bucket.rate(149.0) == pytest.approx(10 * max(FLOOR_SHARE, DECREASE_SPACING_S / RECOVERY_S), rel=0.1)
    pacer = Pacer()
    pacer.join("client", 10, None)
    pacer.start_refused(0.0)
    assert [sum(take(0.0) == 0 for _ in range(9)) for take in (pacer.try_start, pacer.try_stop)] == [1, 2]


async def test_a_turn_takes_one_slot() -> None:
    answers = [0.01, 0.005, 0.0]
    await take_turn(lambda now: answers.pop(0))
    assert answers == []


def test_lowest_limit_of_all_members_wins_until_it_leaves() -> None:
    pacer = Pacer()
    pacer.join("fast", 100, None)
    pacer.join("slow", 10, None)
    assert sum(pacer.try_start(0.0) == 0 for _ in range(50)) == 2  # a fifth of a second's worth at once
    pacer.leave("slow")
    assert sum(pacer.try_start(1000.0) == 0 for _ in range(50)) == 20


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_paces_of_its_own() -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:  # as the client's thread does while it takes a slot
        with shared_pacer("arn", None)._lock:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends this process if it waits for the lock
        shared_pacer("arn", None).join("client", 10, None)
        os._exit(0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
