"""Readers of the answers that the dialects write, as a client of each would read them: what is written must come back."""

from __future__ import annotations

from typing import Any

import msgspec

from agentcore_rl_toolkit.messages.dialects import (
    Delta,
    Reply,
    ToolDelta,
    Usage,
)
from agentcore_rl_toolkit.messages.dialects.canonical import CONTENT_FILTER, LENGTH, STOP, TOOL_CALLS

from ..reply_builder import ReplyBuilder
from ..sse_parser import Event, SSEParser
from .chat_reader import ChatStream, decode_reply


class _Stream:
    """Bytes of a stream, the whole reply at the end."""

    def __init__(self) -> None:
        self._parser = SSEParser()
        self._builder = ReplyBuilder()
        self._calls: dict[int, int] = {}  # index of a block or an item -> position among the calls
        self.done = False

    @property
    def error(self) -> dict[str, Any] | None:
        return self._builder.error

    def feed(self, data: bytes) -> None:
        self._take(self._parser.feed(data))

    def finish(self) -> None:
        self._take(self._parser.finish())

    def reply(self) -> Reply:
        return self._builder.reply()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            delta = self._read(msgspec.json.decode(event.data))
            if delta is not None:
                self._builder.add(delta)

    def _read(self, body: dict[str, Any]) -> Delta | None:
        raise NotImplementedError


_FINISH_REASONS: dict[str | None, str] = {
    "end_turn": STOP,
    "stop_sequence": STOP,
    "pause_turn": STOP,
    "max_tokens": LENGTH,
    "model_context_window_exceeded": LENGTH,
    "tool_use": TOOL_CALLS,
    "refusal": CONTENT_FILTER,
}


def _anthropic_usage(usage: dict[str, Any], before: Usage | None) -> Usage:
    cached = usage.get("cache_read_input_tokens") or 0
    fresh = usage.get("input_tokens")
    prompt = None if fresh is None else fresh + cached + (usage.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=prompt if prompt else before.prompt_tokens if before else prompt,
        completion_tokens=usage.get("output_tokens"),
        cached_tokens=cached or (before.cached_tokens if before else None),
    )


class AnthropicStream(_Stream):
    def _read(self, body: dict[str, Any]) -> Delta | None:
        kind = body.get("type")
        if kind == "content_block_delta":
            return self._block_delta(body)
        if kind == "content_block_start":
            return self._block_start(body)
        if kind == "message_start":
            message = body.get("message") or {}
            self._builder.id = message.get("id") or ""
            self._builder.model = message.get("model") or ""
            return Delta(usage=_anthropic_usage(message.get("usage") or {}, None))
        if kind == "message_delta":
            answer = body.get("delta") or {}
            reason = answer.get("stop_reason")
            return Delta(
                finish_reason=_FINISH_REASONS.get(reason, reason),
                stop_sequence=answer.get("stop_sequence"),
                usage=_anthropic_usage(body.get("usage") or {}, self._builder.usage),
            )
        if kind == "message_stop":
            self.done = True
        elif kind == "error":
            self._builder.error = body.get("error") or {"message": "the stream ended with an error"}
        return None

    def _block_start(self, body: dict[str, Any]) -> Delta | None:
        block = body.get("content_block") or {}
        if block.get("type") == "text":
            return Delta(text=block["text"]) if block.get("text") else None
        if block.get("type") != "tool_use":
            return None
        position = self._calls.setdefault(body.get("index") or 0, len(self._calls))
        return Delta(tool_calls=[ToolDelta(index=position, id=block.get("id"), name=block.get("name"))])

    def _block_delta(self, body: dict[str, Any]) -> Delta | None:
        answer = body.get("delta") or {}
        kind = answer.get("type")
        if kind == "text_delta":
            return Delta(text=answer.get("text") or "")
        if kind == "thinking_delta":
            return Delta(reasoning=answer.get("thinking") or "")
        if kind == "input_json_delta":
            position = self._calls.setdefault(body.get("index") or 0, len(self._calls))
            return Delta(tool_calls=[ToolDelta(index=position, arguments=answer.get("partial_json") or "")])
        return None


def anthropic_reply(body: bytes) -> Reply:
    answer = msgspec.json.decode(body)
    builder = ReplyBuilder()
    builder.id = answer.get("id") or ""
    builder.model = answer.get("model") or ""
    reason = answer.get("stop_reason")
    calls = 0
    for block in answer.get("content") or ():
        kind = block.get("type")
        if kind == "text":
            builder.add(Delta(text=block.get("text") or ""))
        elif kind == "thinking":
            builder.add(Delta(reasoning=block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            piece = ToolDelta(index=calls, id=block.get("id"), name=block.get("name"), arguments=arguments)
            builder.add(Delta(tool_calls=[piece]))
            calls += 1
    usage = _anthropic_usage(answer.get("usage") or {}, None)
    builder.add(
        Delta(finish_reason=_FINISH_REASONS.get(reason, reason), stop_sequence=answer.get("stop_sequence"), usage=usage)
    )
    return builder.reply()


def _responses_usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    return Usage(
        prompt_tokens=usage.get("input_tokens"),
        completion_tokens=usage.get("output_tokens"),
        cached_tokens=(usage.get("input_tokens_details") or {}).get("cached_tokens"),
        reasoning_tokens=(usage.get("output_tokens_details") or {}).get("reasoning_tokens"),
    )


def _finish_reason(response: dict[str, Any], *, calls: bool) -> str | None:
    status = response.get("status")
    if status == "completed":
        return TOOL_CALLS if calls else STOP
    if status == "incomplete":
        why = (response.get("incomplete_details") or {}).get("reason")
        return CONTENT_FILTER if why == "content_filter" else LENGTH
    return "error" if status == "failed" else None


class ResponsesStream(_Stream):
    def _read(self, body: dict[str, Any]) -> Delta | None:
        kind = body.get("type") or ""
        text = body.get("delta")
        if kind == "response.output_text.delta":
            return Delta(text=text or "", logprob_entries=body.get("logprobs") or None)
        if kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            return Delta(reasoning=text or "")
        if kind == "response.refusal.delta":
            return Delta(refusal=text or "")
        if kind == "response.function_call_arguments.delta":
            return Delta(tool_calls=[ToolDelta(index=self._position(body), arguments=text or "")])
        if kind == "response.output_item.added":
            item = body.get("item") or {}
            if item.get("type") == "function_call":
                piece = ToolDelta(index=self._position(body), id=item.get("call_id"), name=item.get("name"))
                return Delta(tool_calls=[piece])
            return None
        response = body.get("response")
        if isinstance(response, dict):
            return self._state(kind, response)
        if kind == "error":
            self._builder.error = {"message": body.get("message"), "code": body.get("code")}
        return None

    def _position(self, body: dict[str, Any]) -> int:
        return self._calls.setdefault(body.get("output_index") or 0, len(self._calls))

    def _state(self, kind: str, response: dict[str, Any]) -> Delta | None:
        self._builder.id = self._builder.id or response.get("id") or ""
        self._builder.model = self._builder.model or response.get("model") or ""
        self._builder.created = self._builder.created or int(response.get("created_at") or 0)
        if kind not in ("response.completed", "response.incomplete", "response.failed"):
            return None
        self.done = True
        if kind == "response.failed":
            self._builder.error = response.get("error") or {"message": "the response failed"}
        finish = _finish_reason(response, calls=bool(self._calls))
        return Delta(finish_reason=finish, usage=_responses_usage(response.get("usage")))


def responses_reply(body: bytes) -> Reply:
    answer = msgspec.json.decode(body)
    builder = ReplyBuilder()
    builder.id = answer.get("id") or ""
    builder.model = answer.get("model") or ""
    builder.created = int(answer.get("created_at") or 0)
    calls = 0
    for item in answer.get("output") or ():
        kind = item.get("type")
        if kind == "function_call":
            piece = ToolDelta(
                index=calls, id=item.get("call_id"), name=item.get("name"), arguments=item.get("arguments") or ""
            )
            builder.add(Delta(tool_calls=[piece]))
            calls += 1
        elif kind == "reasoning":
            for part in item.get("content") or item.get("summary") or ():
                builder.add(Delta(reasoning=part.get("text") or ""))
        elif kind == "message":
            for part in item.get("content") or ():
                if part.get("type") == "refusal":
                    builder.add(Delta(refusal=part.get("refusal") or ""))
                else:
                    entries = part.get("logprobs") or None
                    builder.add(Delta(text=part.get("text") or "", logprob_entries=entries))
    if answer.get("error"):
        builder.error = answer["error"]
    builder.add(
        Delta(finish_reason=_finish_reason(answer, calls=calls > 0), usage=_responses_usage(answer.get("usage")))
    )
    return builder.reply()


STREAMS = {"chat": ChatStream, "completions": ChatStream, "responses": ResponsesStream, "anthropic": AnthropicStream}
REPLIES = {
    "chat": decode_reply,
    "completions": decode_reply,
    "responses": responses_reply,
    "anthropic": anthropic_reply,
}
