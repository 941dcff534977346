"""The clock by which silence is counted: what it leaves out, and that it never stands still for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.client.records.look_clock import LATE, LookClock


def test_looks_that_come_when_they_are_due_leave_nothing_out() -> None:
    clock = LookClock()
    for k in range(100):
        clock.look(k * 0.3, 0.25)  # each took 50 ms itself
    assert (clock.left_out_s, clock.at(29.7)) == (0.0, 29.7)


def test_a_process_that_stood_still_does_not_count_that_time_as_silence() -> None:
    clock = LookClock()
    clock.look(0.0, 0.0)
    clock.look(40.0, 0.25)
    assert clock.at(40.0) == 0.5


def test_a_time_without_anybody_to_look_for_is_not_late() -> None:
    clock = LookClock()
    clock.look(0.0, 0.0)
    clock.rest()
    clock.look(40.0, 0.25)
    assert clock.left_out_s == 0.0


@given(gaps=st.lists(st.tuples(st.floats(0.02, 5.0), st.floats(1.0, 1000.0)), min_size=1, max_size=50))
def test_every_look_adds_its_pause_at_least_so_a_dead_session_is_found_however_busy_the_machine_is(
    gaps: list[tuple[float, float]],
) -> None:
    clock, now_s = LookClock(), 0.0
    clock.look(now_s, 0.0)
    for pause_s, times in gaps:
        before_s = clock.at(now_s)
        now_s += pause_s * times
        clock.look(now_s, pause_s)
        assert clock.at(now_s) - before_s == pytest.approx(pause_s * min(times, LATE), abs=1e-6)
