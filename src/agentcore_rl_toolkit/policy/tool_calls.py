"""Tool calls in what the policy wrote: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, whole or as a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ParseStatus = Literal["none", "parsed", "unparsed"]
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call. ``arguments`` is the JSON object exactly as it was written, so that rendering it again gives the same tokens."""

    id: str
    name: str
    arguments: str

    @property
    def arguments_object(self) -> dict[str, Any]:
        return dict(json.loads(self.arguments))

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True)
class ParsedText:
    """Text beside the calls, the calls, and whether every attempt at a call could be read.

    ``status`` is "none" without any attempt and "unparsed" when one could not be read: then there are no calls and ``content`` is
    the whole text, so that nothing the policy wrote is lost.
    """

    content: str
    calls: list[ToolCall]
    status: ParseStatus


def parse_tool_calls(text: str) -> ParsedText:
    """Split a completed text into content and tool calls."""
    if OPEN not in text and CLOSE not in text:
        return ParsedText(content=text, calls=[], status="none")
    before, *blocks = text.split(OPEN)
    calls: list[ToolCall] = []
    for k, block in enumerate(blocks):
        body, mark, after = block.partition(CLOSE)
        call = _read_call(body) if mark else None
        # Between and after calls only white space can be put back where it was.
        if call is None or after.strip():
            return ParsedText(content=text, calls=[], status="unparsed")
        if after and k == len(blocks) - 1:
            before += after
        calls.append(call)
    if not calls:
        return ParsedText(content=text, calls=[], status="unparsed")
    return ParsedText(content=before, calls=calls, status="parsed")


class StreamParser:
    """Splits a growing text into what may be sent at once and what must wait.

    Text from ``<tool_call>`` on is held back until the end, since only then it is known whether all of it can be read; so is an
    end that may turn out to be the beginning of a mark, of a stop string, or of a character.
    """

    def __init__(self, *, stops: Sequence[str] = (), tools: bool = True) -> None:
        self._tools = tools
        self._marks = (*stops, OPEN) if tools else tuple(stops)
        self._sent = 0

    def feed(self, text: str) -> str:
        """New content in the text so far (the whole text, not the increment)."""
        at = text.find(OPEN) if self._tools else -1
        until = at if at >= 0 else len(text) - _undecided(text, self._marks)
        if until <= self._sent:
            return ""
        fresh = text[self._sent : until]
        self._sent = until
        return fresh

    def finish(self, text: str) -> tuple[str, ParsedText]:
        """The rest of the content, and the parse of the whole text."""
        parsed = parse_tool_calls(text) if self._tools else ParsedText(content=text, calls=[], status="none")
        rest = parsed.content[self._sent :]
        self._sent = max(self._sent, len(parsed.content))
        return rest, parsed


def _undecided(text: str, marks: Sequence[str]) -> int:
    """Length of the end of the text that may be the beginning of a mark, or of a character cut in its bytes."""
    longest = len(text) - len(text.rstrip("\ufffd"))
    for mark in marks:
        for n in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:n]):
                longest = n
                break
    return longest


def _read_call(body: str) -> ToolCall | None:
    """A call from the text between the marks; None when it is not one."""
    stripped = body.strip()
    try:
        call = json.loads(stripped)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(id="call_" + secrets.token_hex(12), name=call["name"], arguments=_as_written(stripped, arguments))


def _as_written(call: str, arguments: dict[str, Any]) -> str:
    """The arguments' own characters, when they can be found for certain; else the same object written anew."""
    key = '"arguments": '
    at = call.find(key)
    if at >= 0:
        try:
            value, end = _DECODER.raw_decode(call, at + len(key))
        except (json.JSONDecodeError, RecursionError):
            return json.dumps(arguments, ensure_ascii=False)
        if value == arguments:
            return call[at + len(key) : end]
    return json.dumps(arguments, ensure_ascii=False)
