"""The goal of the training: a number for each rollout. `test_reward.py` tests it."""

import re

from agentcore_rl_toolkit import RewardFunction


class AnswerReward(RewardFunction):
    """Return 1.0 if the last whole number of the reply is the expected answer, and 0.0 otherwise."""

    def __call__(self, *, response_text: str, answer: str) -> float:
        numbers = re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", response_text))
        return float(bool(numbers) and numbers[-1] == answer)
