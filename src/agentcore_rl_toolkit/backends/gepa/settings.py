"""The settings of a search, and its budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ..llm_judge import JudgeSettings
from ..settings import Count, NotNegative, Positive


class SearchSettings(JudgeSettings):
    """Settings of `agentcore-rl optimize`, by `--set NAME=VALUE`.

    ``max_rollouts`` counts all rollouts. ``batch`` rows show a text's failures to the reflection model, and are the first test of
    a proposed text. The search ends when the mean reward of a text is ``perfect``. ``max_usd`` is a budget in the prices below it
    and `judge_price`. A judge's scores are rewards, and the reflection model sees its reasons.
    """

    max_rollouts: Count = 500
    batch: Count = 3
    perfect: float = 1.0
    concurrency: Count = 16
    timeout_s: Positive = 900.0
    sampling_params: Mapping[str, Any] | None = None
    seed: int = 0
    max_usd: Positive | None = None
    usd_per_rollout: NotNegative = 0.0
    usd_per_million_input: NotNegative = 0.0
    usd_per_million_output: NotNegative = 0.0

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.max_usd is not None and not (self.usd_per_rollout or self.usd_per_million_output):
            raise ConfigError("max_usd needs prices: usd_per_rollout, usd_per_million_input, usd_per_million_output")

    def usd(self, spent: Mapping[str, float], more_rollouts: int = 0) -> float:
        """Return the cost in dollars of a search so far, and of further rollouts.

        ``spent`` has `rollouts`, `input_tokens`, `output_tokens` of the reflection model, and `judge_usd`.
        """
        tokens = (
            spent["input_tokens"] * self.usd_per_million_input + spent["output_tokens"] * self.usd_per_million_output
        )
        return (spent["rollouts"] + more_rollouts) * self.usd_per_rollout + tokens / 1e6 + spent["judge_usd"]

    def allows(self, spent: Mapping[str, float], more_rollouts: int) -> bool:
        within = self.max_usd is None or self.usd(spent, more_rollouts) <= self.max_usd
        return within and spent["rollouts"] + more_rollouts <= self.max_rollouts
