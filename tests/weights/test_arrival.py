"""Weights that a trainer moved by itself: judged by the logprobs of what was sampled since."""

from __future__ import annotations

import math

import pytest

from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.weights import check_arrived
from agentcore_rl_toolkit.weights.arrival import MAX_MEAN_GAP


@pytest.mark.parametrize(
    ("gap_sum", "tokens", "limit", "mean"),
    [(30.0, 1000, MAX_MEAN_GAP, 0.03), (300.0, 1000, None, 0.3), (0.0, 0, MAX_MEAN_GAP, None)],
)
def test_a_mean_within_the_limit_or_without_one_is_returned(
    gap_sum: float, tokens: int, limit: float | None, mean: float | None
) -> None:
    assert check_arrived(gap_sum, tokens, 3, limit) == (mean and pytest.approx(mean))


@pytest.mark.parametrize("gap_sum", [300.0, math.nan, math.inf])
def test_an_absurd_mean_ends_the_run_with_its_version_and_the_page(gap_sum: float) -> None:
    with pytest.raises(
        WeightsError, match=r"did not arrive: .* of version 3 differ by .* over 1000 tokens .*docs/engines\.md#"
    ):
        check_arrived(gap_sum, 1000, 3)
