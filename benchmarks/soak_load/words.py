"""What every rollout must come to, by its input id alone: its turns, the tokens of each, and its reward."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

TOKENS = 7  # of a turn, besides the one that ends it


def turns_of(task: str) -> int:
    return 2 + zlib.crc32(task.encode()) % 2


def tokens_of(task: str, turn: int) -> list[int]:
    """The numbers that the model samples in this turn; different in every turn of every task."""
    return [10 + zlib.crc32(f"{task}/{turn}/{place}".encode()) % 880 for place in range(TOKENS)]


def text_of(task: str, turn: int) -> str:
    """The reply, in the words of the scripted engine's tokenizer."""
    return " ".join(f"w{number}" for number in tokens_of(task, turn))


def reward_from(texts: Iterable[str]) -> float:
    """The agent's reward, from what it read. Never 0: that is what a failure must not become."""
    return 1 + sum(int(word[1:]) for text in texts for word in text.split()) % 997


def reward_of(task: str) -> float:
    return reward_from(text_of(task, turn) for turn in range(turns_of(task)))
