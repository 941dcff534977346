"""The scripted engine's tokenizer, chat template and logprobs.

They are exact in both directions, so that a test knows what must be recorded. The module also has the faults that a
test sets on the engine, and the engine's log of requests.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

START, END = 1, 2
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6, "developer": 3}
_FIRST_WORD = 1000
VOCABULARY = 50_000


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one call.

    ``status`` answers with an error body; ``drop_after`` cuts the connection after so many body bytes (0: before the
    head); ``body`` replaces the answer's body; ``delay_s`` waits first, ``gate`` until it is set; ``edit`` changes the reply (or
    each chunk).
    """

    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    drop_after: int | None = None
    delay_s: float = 0.0
    gate: asyncio.Event | None = None
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None


@dataclass
class Seen:
    """A request as the engine received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False


def error_body(status: int, message: str = "scripted failure") -> bytes:
    error = {"message": f"{message} {status}", "type": "X", "param": None, "code": status}
    return json.dumps({"error": error}).encode()


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
