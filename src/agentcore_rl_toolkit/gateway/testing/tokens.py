"""The scripted engine's tokenizer, chat template and logprobs.

They are exact in both directions, so that a test knows what must be recorded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

START, END = 1, 2
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6, "developer": 3}
_FIRST_WORD = 1000
VOCABULARY = 50_000


def encode_text(text: str) -> list[int]:
    """Tokenize text: the word ``w17`` is token 17, any other word a token made from its checksum."""
    return [
        int(word[1:])
        if word[:1] == "w" and word[1:].isdigit()
        else _FIRST_WORD + zlib.crc32(word.encode()) % VOCABULARY
        for word in text.split()
    ]


def decode_ids(ids: Iterable[int]) -> str:
    return " ".join(f"w{i}" for i in ids if i != END)


def encode_messages(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Render messages with a toy chat template.

    It ends with the opening of the assistant's reply, so that a prompt extends the earlier prompt and reply.
    """
    ids: list[int] = []
    for message in messages:
        ids += [START, _ROLES.get(message.get("role", "user"), 7)]
        content = message.get("content") or ""
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        ids += encode_text(content)
        for call in message.get("tool_calls") or []:
            ids += encode_text(call["function"]["name"] + " " + call["function"]["arguments"])
        ids.append(END)
    return [*ids, START, _ROLES["assistant"]]


def logprob_of(token: int) -> float:
    """Return the logprob this engine gives a token: made up, and exact in 32 bits."""
    return -(token % 97) / 64 - 0.015625
