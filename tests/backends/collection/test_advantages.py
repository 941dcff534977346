"""Advantages over groups with masked rollouts, and the weights of forked episodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.backends.collection.advantages import advantages, dr_grpo, grpo, rloo
from agentcore_rl_toolkit.backends.collection.credit import Credit, Signal, token_advantages
from agentcore_rl_toolkit.errors import ConfigError

rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=16)


def test_dr_grpo_only_centres() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_grpo_divides_by_the_sample_spread_if_it_is_larger_than_epsilon() -> None:
    assert grpo([1.0, 0.0]) == pytest.approx([0.70711, -0.70711], abs=1e-5)
    assert grpo([0.0, 1.0, 2.0], epsilon=1.0) == [0.0] * 3
    assert grpo([0.0, 1.0, 2.0], epsilon=0.75) == pytest.approx([-1 / 1.75, 0.0, 1 / 1.75])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert rloo([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])
    assert (rloo([1.0, 0.0]), rloo([None, 1.0])) == ([1.0, -1.0], [None, None])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_a_single_usable_rollout_teaches_nothing(estimator: str) -> None:
    assert advantages([None, 1.0], estimator=estimator) == [None, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(rewards_G=rewards)
def test_masking_equals_leaving_out(estimator: str, rewards_G: list[float | None]) -> None:
    found = advantages(rewards_G, estimator=estimator)
    kept = advantages([r for r in rewards_G if r is not None], estimator=estimator)
    assert [a for a, r in zip(found, rewards_G, strict=True) if r is not None] == kept
    assert all(a is None for a, r in zip(found, rewards_G, strict=True) if r is None)
    assert math.fsum(a for a in kept if a is not None) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(
    "rewards_G", [[0.1] * 3, [0.7] * 6, [0.1 + 0.2, 0.3], [0.0, 0.1 + 0.2 - 0.3], [1e9 / 3] * 7, [-0.1, None, -0.1]]
)
def test_equal_rewards_have_advantage_zero(estimator: str, rewards_G: list[float | None]) -> None:
    assert set(advantages(rewards_G, estimator=estimator)) <= {0.0, None}


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo"])
def test_groups_of_equal_rewards_have_no_advantage_at_any_token(estimator: Any) -> None:
    """Also with credit per turn, where the returns of turns are compared."""
    for credit in ("episode", "turn"):
        mask, turns = [1, 1, 0, 1], [(0, 0, 2, 0.1), (1, 3, 4, 0.1)]
        signals = [
            Signal(rollout=f"r{i}", reward=0.1, mask=mask, turns=turns if credit == "turn" else ()) for i in range(3)
        ]
        for found in token_advantages(signals, Credit(credit=credit), estimator=estimator):
            assert found == [0.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        grpo([1.0, bad])
