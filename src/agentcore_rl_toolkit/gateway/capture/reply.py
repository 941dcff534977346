"""Reads a finished reply, once, by typed decoders.

Replies are JSON in the shape of OpenAI's chat completions with the token fields of vLLM: ``prompt_token_ids`` at the top,
``choices[].token_ids``, ``choices[].logprobs``. The decoder skips all other fields and builds nothing of them.

Structs without a place in the garbage collector's lists (``gc=False``) make this three times as fast. Streams are read by
`capture.stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.errors import NOT_JSON
from .experts import binary
from .record import Captured, ChoiceRecord
from .token_numbers import (
    ABSENT,
    Numbered,
    brackets,
    own_words,
    packed_ids,
    packed_logprobs,
    raw,
    take_prompt,
    without_numbers,
)
from .versions import Versions, put, version_of


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolPiece(msgspec.Struct, gc=False):
    """A tool call, or an event's part of one."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None

    def arguments(self) -> str:
        """JSON text, which some engines write as an object."""
        given = self.function.arguments if self.function else None
        return _encode(given).decode() if isinstance(given, dict) else given or ""


class Message(msgspec.Struct, gc=False):
    """An assistant's message, or an event's part of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolPiece] | None = None


class Choice(Numbered, gc=False):
    """One choice of a reply, or of an event of a stream."""

    message: msgspec.Raw = ABSENT
    delta: Message | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = ABSENT
    weight_version_first: int | str | None = None  # the built-in policy's
    weight_version_last: int | str | None = None
    stop_reason: msgspec.Raw = ABSENT


class Event(msgspec.Struct, gc=False):
    """One event of a stream: only what changes from one to the next."""

    choices: list[Choice] = []
    prompt_token_ids: msgspec.Raw = ABSENT
    weight_version: int | str | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class _Reply(Event, gc=False):
    id: str | None = None
    model: str | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


_reply = msgspec.json.Decoder(_Reply)
_str = msgspec.json.Decoder(str)
_usage = msgspec.json.Decoder(_Usage)
_encode = msgspec.json.Encoder().encode


def read_reply(body: bytes, *, entries: bool = False) -> Captured:
    """Decode a whole (not streamed) reply. ``entries``: the agent asked for logprobs, which are kept in the engine's words.

    Where only the tokens cannot be read ``problem`` says so. Raises: CaptureError when it is no reply for an agent either.
    """
    prompt, rest = take_prompt(body)
    try:
        reply = _reply.decode(rest)
        for kept in (reply.usage, *(choice.message for choice in reply.choices)):
            check_text(bytes(kept))
    except NOT_JSON as e:
        raise CaptureError(f"the engine's reply cannot be read: {e}") from e
    version = version_of(reply.weight_version)
    captured = Captured(
        choices=[],
        prompt=prompt if prompt is not None else brackets(reply.prompt_token_ids),
        reply_id=reply.id,
        model=reply.model,
        usage=raw(reply.usage),
        error=raw(reply.error),
        plain=without_numbers(rest, reply.choices, reply.prompt_token_ids),
    )
    found: list[Versions] = []
    for choice in reply.choices:
        found.append(versions := Versions())
        if version is not None:
            versions.named(version, tokens=True)
        versions.spans(version_of(choice.weight_version_first), version_of(choice.weight_version_last))
        captured.choices.append(_choice(captured, choice, entries=entries))
    put(captured, found)
    check(captured)
    return captured


def _choice(captured: Captured, choice: Choice, *, entries: bool) -> ChoiceRecord:
    message = raw(choice.message)
    if message is None:
        raise CaptureError(f"choice {choice.index} of the engine's reply has no message")
    ids = read_numbers(captured, packed_ids, [choice.token_ids])
    logprobs = None if ids is None else read_numbers(captured, packed_logprobs, [choice.logprobs])
    record = choice_record(
        captured,
        choice.index,
        ids,
        logprobs,
        choice.finish_reason,
        message,
        _parse_status(message),
    )
    record.routed_experts = experts(captured, choice.routed_experts)
    record.stop_sequence = stop_sequence(choice.stop_reason)
    if entries and (words := own_words(choice.logprobs)) is not None:
        record.agent_logprobs = _encode({"content": words})
    return record


def read_numbers(
    captured: Captured, pack: Callable[[Sequence[Any]], bytes | None], values: Sequence[Any]
) -> bytes | None:
    """Numbers as packed arrays; of those that cannot be read none, and the capture says why."""
    try:
        return pack(values)
    except CaptureError as e:
        captured.problem = captured.problem or str(e)
        return None


def check_text(body: bytes) -> None:
    """Check that a body is UTF-8, also where decoders keep it raw: it goes into records. Raises: UnicodeDecodeError."""
    if not body.isascii():
        body.decode()


def stop_sequence(reason: msgspec.Raw) -> str | None:
    """The stop string that an engine names as the reason of an answer's end; not the id of a stop token."""
    return _str.decode(reason) if reason is not ABSENT and bytes(reason)[:1] == b'"' else None


def choice_record(
    captured: Captured,
    index: int,
    ids: bytes | None,
    logprobs: bytes | None,
    finish_reason: str | None,
    message: bytes,
    parse_status: str,
) -> ChoiceRecord:
    """One choice of a reply; what is wrong with its tokens (int32 and float32, packed) goes to `captured`."""
    if ids is None:
        logprobs = None
    else:
        captured.has_tokens = True
        problem = None
        if logprobs is None:
            problem = f"choice {index} has {len(ids) // 4} token ids and no logprobs"
        elif len(logprobs) != len(ids):
            problem = f"choice {index} has {len(ids) // 4} token ids and {len(logprobs) // 4} logprobs"
            logprobs = None
        captured.problem = captured.problem or problem
    if finish_reason is None:
        captured.complete = False
    return ChoiceRecord(
        index=index,
        ids=ids or b"",
        logprobs=logprobs,
        finish_reason=finish_reason,
        parse_status=parse_status,
        message=message,
    )


def experts(captured: Captured, response: msgspec.Raw) -> bytes | None:
    """The choice's expert routing; when it cannot be read the capture says why."""
    try:
        return binary(response)
    except CaptureError as e:
        captured.problem = captured.problem or str(e)
        return None


def check(captured: Captured) -> None:
    if not captured.choices:
        captured.complete = False
    if captured.has_tokens and captured.prompt is None and captured.problem is None:
        captured.problem = "the engine returned completion token ids but no prompt token ids"
    if captured.usage is not None and captured.has_tokens and captured.problem is None:
        try:
            counted = _usage.decode(captured.usage).completion_tokens
        except NOT_JSON:
            counted = None
        have = sum(len(c.ids) // 4 for c in captured.choices)
        # vLLM before 0.11 left the ids of tool-call tokens out of streams; training on the rest would be silently
        # wrong.
        if counted is not None and counted != have:
            captured.problem = f"the engine counted {counted} completion tokens and returned {have} token ids"


_BRACKETED = b"[TOOL_CALLS]"
_MARKS = (
    b"<tool_call>",
    b"<function=",
    b"<|python_tag|>",
    b"<|tool_call",
    *(m.encode() for m in ("<｜tool▁call", "<｜DSML｜")),
    *(rb"<\uff5ctool\u2581call", rb"<\uff5cDSML"),  # as some servers write them
)


def _parse_status(message: bytes) -> str:
    """Whether the engine parsed tool calls, or left text that looks like one."""
    at = message.find(b'"tool_calls":[')
    if at >= 0 and message[at + 14 : at + 15] != b"]":
        return "parsed"
    return _marked(message)


def text_status(parts: list[str]) -> str:
    return _marked("".join(parts).encode())


def _marked(text: bytes) -> str:
    if _BRACKETED in text:
        return "unparsed"
    return "unparsed" if b"<" in text and any(mark in text for mark in _MARKS) else "none"
