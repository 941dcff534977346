"""What a rollout earns."""

from __future__ import annotations

from typing import Any

from agentcore_rl_toolkit import RewardFunction


class BenchmarkReward(RewardFunction):
    """The benchmark's reward on its published basis: 1.0 or 0.0.

    ``strict`` also asks for every gold action, so that a goal that was met without the published repair earns nothing.
    ``partial_credit`` adds that much times the share of the gold actions that were taken. It is for training, where a task of
    nine faults hardly ever earns anything else; what it adds is no score of the benchmark.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    def __call__(self, *, scores: Any, partial_credit: float = 0.0) -> float:
        earned = scores.published * scores.actions if self.strict else scores.published
        return float(earned + partial_credit * scores.share)
