"""Intervals of means, and pass rates."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentcore_rl_toolkit.stats.intervals import interval, pass_rates

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=30) | st.lists(st.sampled_from([0.0, 1.0]), min_size=1)


@given(REWARDS, st.integers(0), st.floats(0, 0.01))
@example([1.0, 1.0], 0, 0.0)
@example([0.5] * 20, 0, 0.0)
@example([1.0] * 10, 3, 0.01)
def test_interval_holds_the_mean_and_a_small_change_of_a_value_changes_it_little(
    values: list[float], place: int, change: float
) -> None:
    low, high = interval(values)
    assert low is not None
    assert high is not None
    assert low - 1e-9 <= statistics.fmean(values) <= high + 1e-9
    assert high - low > 0.5 / (len(values) + 4)
    other = list(values)
    other[place % len(values)] -= change
    assert interval(other) == pytest.approx((low, high), abs=3 * change + 1e-9)


def test_interval_of_zeros_and_ones_is_that_of_agresti_and_coull() -> None:
    assert interval([1.0] * 9 + [0.0]) == pytest.approx((0.574, 1.0), abs=1e-3)
    assert interval([1.0] * 30 + [0.0] * 70) == pytest.approx((0.2187, 0.3961), abs=1e-3)


def test_pass_rates_count_solved_rollouts_of_an_input() -> None:
    at, every = pass_rates([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.5], [1.0, 1.0]])
    assert at == pytest.approx({1: 0.5, 2: (1 - 1 / 6 + 0 + 1) / 3, 4: 0.5})
    assert every == pytest.approx({1: 0.5, 2: (1 / 6 + 0 + 1) / 3, 4: 0.0})
    assert pass_rates([[1.0], [0.0]]) == ({1: 0.5}, {1: 0.5})
    assert pass_rates([]) == ({}, {})


def test_the_interval_of_rewards_from_minus_one_to_one_is_the_scaled_one_of_zero_to_one() -> None:
    values = [0.0, 0.0, 0.25, 1.0]
    low, high = interval(values)
    assert low is not None
    assert high is not None
    assert interval([2 * value - 1 for value in values]) == (pytest.approx(2 * low - 1), pytest.approx(2 * high - 1))
