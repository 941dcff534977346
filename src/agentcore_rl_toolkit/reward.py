"""The base class for reward functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class RewardFunction(ABC):
    """Scores one finished rollout.

    Subclass it and implement `__call__`; what it returns goes under ``rewards`` in the agent's result. Arguments are keyword-only
    so that each task can name what it scores.

    Example:

        class ExactMatch(RewardFunction):
            def __call__(self, *, response: str, answer: str, **_: object) -> float:
                return 1.0 if response.strip() == answer else 0.0
    """

    @abstractmethod
    def __call__(self, **kwargs: Any) -> float | list[float]:
        """Reward of the rollout: a finite number, or a list of numbers whose last element is the rollout's reward."""
