"""The idle clock, without waiting."""

from __future__ import annotations

from agentcore_rl_toolkit.runtime.sessions.activity import ActivityClock


def clock(**changes: object) -> ActivityClock:
    return ActivityClock(**{"born_s": 0.0, "idle_timeout_s": 900.0, "max_lifetime_s": 28_800.0, **changes})  # type: ignore[arg-type]


def test_a_finished_session_is_pinged_once_soon_and_then_at_its_limit() -> None:
    c = clock()
    c.begin(10.0)
    c.end(20.0)
    assert c.next_check_s() == 35.0
    c.saw_ping("Healthy", 35.0)
    assert c.next_check_s() == 920.0
    assert c.verdict(920.0) is None  # not on the answer of 35 s
    c.saw_ping("Healthy", 920.0)
    assert c.verdict(920.0) == "idle"


def test_an_invocation_in_flight_is_never_idle() -> None:
    c = clock()
    c.begin(10.0)
    c.saw_ping("Healthy", 5_000.0)
    assert c.verdict(5_000.0) is None
    assert c.next_check_s() == 28_800.0


def test_busy_is_asked_again_and_counts_until_it_is_not() -> None:
    c = clock()
    c.begin(0.0)
    c.end(1.0)
    c.saw_ping("HealthyBusy", 16.0)
    assert c.next_check_s() == 31.0
    c.saw_ping("Healthy", 31.0)
    assert c.last_active_s == 31.0
    assert c.next_check_s() == 931.0


def test_max_lifetime_counts_whatever_happens() -> None:
    c = clock(max_lifetime_s=100.0)
    c.begin(1.0)
    assert c.next_check_s() == 100.0
    assert c.verdict(99.9) is None
    assert c.verdict(100.0) == "max_lifetime"


def test_an_agent_that_does_not_answer_its_ping_is_idle_at_its_limit() -> None:
    c = clock(idle_timeout_s=60.0)
    c.saw_ping(None, 60.0)
    assert c.verdict(60.0) == "idle"


def test_ping_pace_follows_the_idle_timeout() -> None:
    assert [clock(idle_timeout_s=t).ping_interval_s for t in (60.0, 300.0, 900.0, 9_000.0)] == [2.0, 5.0, 15.0, 15.0]
