"""How old sessions are by times of a clock that may have been stepped."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.gateway.sessions.ages import ages

YEAR_S = 365 * 86400.0


@pytest.mark.parametrize(
    ("closed", "now", "found"),
    [
        ([], 100.0, []),
        ([10.0, 70.0], 100.0, [90.0, 30.0]),
        ([10.0, 70.0], 60.0, [60.0, 0.0]),  # the clock was set back since
        ([10.0, YEAR_S, 50.0], 70.0, [45.0, 20.0, 20.0]),  # it was wrong for a while
        ([10.0, 20.0], YEAR_S, [35.0, 25.0]),  # it is wrong now, or nobody was here
    ],
)
def test_sessions_are_as_old_as_their_times_allow(closed: list[float], now: float, found: list[float]) -> None:
    assert ages(closed, now, 100.0) == found


def test_without_a_bound_the_clock_is_believed() -> None:
    assert ages([0.0], YEAR_S, None) == [YEAR_S]
