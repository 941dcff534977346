"""When a session shows life."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.app.rollout import beat_pause_s


@pytest.mark.parametrize(
    ("took_s", "fraction", "pause_s"),
    [(0.0, 0.0, 10.0), (0.0, 0.5, 8.5), (4.0, 0.0, 6.0), (9.0, 0.5, 0.0), (10.0, 0.0, 0.0), (12.0, 0.9, 0.0)],
)
def test_heartbeats_begin_a_period_apart_however_long_the_store_takes(
    took_s: float, fraction: float, pause_s: float
) -> None:
    assert beat_pause_s(10.0, took_s, fraction) == pytest.approx(pause_s)
