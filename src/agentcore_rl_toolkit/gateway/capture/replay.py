"""Make a canonical reply from a record. It has no logprobs."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import UpstreamError
from ...messages.errors import NOT_JSON
from ...messages.wire import Reply
from ...messages.wire.canonical import Choice, ToolCall, Usage
from ...messages.wire.history import text_of
from .record import CallRecord


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
        return msgspec.json.encode(given).decode() if isinstance(given, dict) else given or ""


class Message(msgspec.Struct, gc=False):
    """An assistant's message, or an event's part of one."""

    content: str | list[Any] | None = None  # some providers write parts
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolPiece] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else text_of(self.content)


class _Prompt(msgspec.Struct):
    cached_tokens: int | None = None


class _Completion(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Prompt | None = None
    completion_tokens_details: _Completion | None = None


_message = msgspec.json.Decoder(Message)
_usage = msgspec.json.Decoder(_Usage)


def reply_of(record: CallRecord) -> Reply:
    """Return a recorded reply in canonical form. Raises: UpstreamError if a message cannot be read."""
    choices = []
    for choice in record.choices:
        try:
            message = _message.decode(choice.message)
        except NOT_JSON as e:
            raise UpstreamError(f"the engine's message cannot be read: {e}") from e
        choices.append(
            Choice(
                index=choice.index,
                content=message.text or message.refusal or "",
                reasoning=message.reasoning_content or message.reasoning or "",
                tool_calls=[_tool_call(call) for call in message.tool_calls or ()],
                finish_reason=choice.finish_reason,
                stop_sequence=choice.stop_sequence,
            )
        )
    return Reply(
        id=record.reply_id or record.call_id,
        model=record.model or "",
        created=int(record.started_s),
        choices=choices,
        usage=None if record.usage is None else usage_of(record.usage),
    )


def _tool_call(call: ToolPiece) -> ToolCall:
    if call.function is None or not call.function.name:
        raise UpstreamError("the engine's message cannot be read: it calls a function without a name")
    return ToolCall(id=call.id or "", name=call.function.name, arguments=call.arguments())


def usage_of(counted: bytes) -> Usage:
    """Return the tokens that an engine counted. Raises: UpstreamError."""
    try:
        usage = _usage.decode(counted)
    except NOT_JSON as e:
        raise UpstreamError(f"the engine's count of tokens cannot be read: {e}") from e
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=None if prompt is None else prompt.cached_tokens,
        reasoning_tokens=None if completion is None else completion.reasoning_tokens,
    )
