"""Help for rewards: their base class, and the text of an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

# Entries of a dict that hold its text, most telling first.
_TEXT_KEYS = ("result", "response", "answer", "output", "text", "content", "message", "completion", "data")


def answer_text(answer: Any) -> str:
    """Return the final text of what an agent returned, as a scorer gets it, or empty if it has none.

    It reads plain text, dicts with a text under `result` and similar names, messages with content blocks, and lists of streamed
    events: of Strands and Bedrock's ConverseStream, text deltas of the AI SDK, and texts. Of a stream of several messages it is
    the text of the last message with text.

    Example: ``answer_text([{"event": {"contentBlockDelta": {"delta": {"text": "36"}}}}])`` is ``"36"``.
    """
    if isinstance(answer, str):
        return answer
    if isinstance(answer, Mapping):
        return answer_text(next((answer[key] for key in _TEXT_KEYS if answer.get(key) not in (None, "")), ""))
    if not isinstance(answer, Sequence):
        return "" if answer is None else str(answer)
    events = [_event_of(event) for event in answer]
    if all(event is None for event in events):  # blocks of a message, or texts
        events = [answer_text(event) for event in answer]
    messages = "".join(filter(None, events)).split(_BEGIN)
    return next((text for text in reversed(messages) if text.strip()), "")


_BEGIN = "\0begin"  # marks the start of a message


def _event_of(event: Any) -> str | None:
    """Return the text of a streamed event, `_BEGIN` for the first one of a message, None for anything else."""
    if not isinstance(event, Mapping):
        return None
    inner = event.get("event")
    inner = inner if isinstance(inner, Mapping) else event
    if "messageStart" in inner or event.get("type") in ("start-step", "message_start", "start"):
        return _BEGIN
    delta = inner.get("contentBlockDelta")
    if isinstance(delta, Mapping):
        return str((delta.get("delta") or {}).get("text") or "")
    if event.get("type") == "text-delta":  # AI SDK
        return str(event.get("delta") or event.get("textDelta") or "")
    return None


class RewardFunction(ABC):
    """Scores one finished rollout.

    Subclass it and implement `__call__`. Its result goes under ``rewards`` in the agent's result. Arguments are keyword-only
    so that each task can name its inputs.

    Example:
        class ExactMatch(RewardFunction):
            def __call__(self, *, response: str, answer: str, **_: object) -> float:
                return 1.0 if response.strip() == answer else 0.0
    """

    @abstractmethod
    def __call__(self, **kwargs: Any) -> float | list[float]:
        """Return the rollout's reward: a finite number, or a list of numbers whose last one is the rollout's reward."""
