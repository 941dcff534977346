"""Whether the budgets of a search have room for more."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.backends.gepa.settings import SearchSettings
from agentcore_rl_toolkit.errors import ConfigError


def test_rollouts_and_money_are_budgets() -> None:
    settings = SearchSettings(
        max_rollouts=60, max_usd=1.0, usd_per_rollout=0.01, usd_per_million_input=2.0, usd_per_million_output=10.0
    )
    spent = {"rollouts": 20, "input_tokens": 100_000, "output_tokens": 20_000, "judge_usd": 0.1}
    assert settings.usd(spent) == pytest.approx(20 * 0.01 + 0.2 + 0.2 + 0.1)
    assert settings.allows(spent, 30)
    assert not settings.allows(spent, 31)
    dearer = {**spent, "output_tokens": 21_000}
    assert not settings.allows(dearer, 30)


def test_a_budget_in_money_needs_prices() -> None:
    with pytest.raises(ConfigError, match="usd_per_rollout"):
        SearchSettings(max_usd=1.0)
