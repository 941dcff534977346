"""Weights that a trainer moved by itself: judged by the logprobs of what was sampled since."""

from __future__ import annotations

import math

import pytest

from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.weights import check_arrived


def test_rounding_passes_and_is_told() -> None:
    assert check_arrived(30.0, 1000, 3) == pytest.approx(0.03)


@pytest.mark.parametrize("gap_sum", [300.0, math.nan, math.inf])
def test_an_absurd_mean_ends_the_run_with_its_version_and_the_page(gap_sum: float) -> None:
    with pytest.raises(
        WeightsError, match=r"did not arrive: .* of version 3 differ by .* over 1000 tokens .*docs/engines\.md#"
    ):
        check_arrived(gap_sum, 1000, 3)


def test_without_a_limit_it_is_measured_and_not_judged() -> None:
    assert check_arrived(300.0, 1000, None, None) == pytest.approx(0.3)


def test_of_no_token_there_is_no_mean() -> None:
    assert check_arrived(0.0, 0, 3) is None
