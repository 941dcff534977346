"""The reward of a rollout."""

from __future__ import annotations

from typing import Any

from agentcore_rl_toolkit import RewardFunction


class BenchmarkReward(RewardFunction):
    """The reward of the benchmark: 1.0 or 0.0.

    With ``strict``, all published actions are required, too. ``partial_credit`` is multiplied by the share of the published
    actions that were taken, and added. It is only for training, where tasks with many faults are rarely solved completely.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    def __call__(self, *, scores: Any, partial_credit: float = 0.0) -> float:
        earned = scores.published * scores.actions if self.strict else scores.published
        return float(earned + partial_credit * scores.share)
