"""Anthropic message streams, both ways. Source: docs.anthropic.com/en/api/messages-streaming

Theory of operation of the encoder: content comes in blocks, one open at a time: thinking, text, then one per tool
call. A delta of another kind than the open block closes it and opens the next. Pieces of parallel calls may come
interleaved from an engine and this dialect cannot write to two blocks at a time, so the first call is streamed and
the others wait for the end. ``input_tokens`` is known only when the engine tells: at the start if the prompt was
counted here, else at the end."""

from __future__ import annotations

from typing import Any

import msgspec

from .anthropic import SIGNATURE, message_id, stop_reason, usage_dict
from .builder import ReplyBuilder
from .canonical import CONTENT_FILTER, LENGTH, STOP, TOOL_CALLS, Delta, Reply, Request, ToolDelta, Usage, new_id
from .errors import RequestError, anthropic_error
from .openai_stream import decode_json
from .sse import Event, SSEParser, encode_event


def _event(name: str, body: dict[str, Any]) -> bytes:
    return encode_event(msgspec.json.encode({"type": name, **body}), name)


class Encoder:
    """Deltas -> the bytes of a message stream. Only choice 0 exists in this dialect."""

    content_type = "text/event-stream"

    def __init__(
        self, request: Request, *, reply_id: str, model: str = "", created: int = 0, prompt_tokens: int | None = None
    ) -> None:
        self._request = request
        self._id = message_id(reply_id)
        self._model = model or request.model
        self._usage = Usage(prompt_tokens=prompt_tokens)
        self._kind: str | None = None
        self._block = -1
        self._call: int | None = None
        self._waiting: dict[int, list[ToolDelta]] = {}
        self._finish: str | None = None
        self._stop_sequence: str | None = None

    def start(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_dict(self._usage),
        }
        return _event("message_start", {"message": message})

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.choice:
            return b""
        out = b""
        if delta.reasoning:
            out += self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        text = delta.text or delta.refusal
        if text:
            out += self._into("text", {"type": "text", "text": ""})
            out += self._delta({"type": "text_delta", "text": text})
        for piece in delta.tool_calls:
            out += self._tool(piece)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            self._stop_sequence = delta.stop_sequence
        return out

    def finish(self) -> bytes:
        out = self._close()
        for index in sorted(self._waiting):
            for piece in self._waiting[index]:
                out += self._write(piece)
            out += self._close()
        self._waiting.clear()
        reason = {
            "stop_reason": stop_reason(self._finish, self._stop_sequence),
            "stop_sequence": self._stop_sequence,
        }
        out += _event("message_delta", {"delta": reason, "usage": usage_dict(self._usage)})
        return out + _event("message_stop", {})

    def error(self, error: RequestError) -> bytes:
        """An error after the stream began."""
        return encode_event(msgspec.json.encode(anthropic_error(error)), "error")

    def _into(self, kind: str, empty: dict[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        return self._close() + self._open(kind, empty)

    def _open(self, kind: str, empty: dict[str, Any]) -> bytes:
        self._kind = kind
        self._block += 1
        return _event("content_block_start", {"index": self._block, "content_block": empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        out = b""
        if self._kind == "thinking":
            out = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._kind = None
        return out + _event("content_block_stop", {"index": self._block})

    def _tool(self, piece: ToolDelta) -> bytes:
        if self._call is not None and piece.index != self._call:
            self._waiting.setdefault(piece.index, []).append(piece)
            return b""
        return self._write(piece)

    def _write(self, piece: ToolDelta) -> bytes:
        out = b""
        if self._kind != "tool_use" or self._call != piece.index:
            block = {"type": "tool_use", "id": piece.id or new_id("toolu_"), "name": piece.name or "", "input": {}}
            out += self._close() + self._open("tool_use", block)
            self._call = piece.index
        if piece.arguments:
            out += self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        return out


_FINISH_REASONS: dict[str | None, str] = {
    "end_turn": STOP,
    "stop_sequence": STOP,
    "pause_turn": STOP,
    "max_tokens": LENGTH,
    "model_context_window_exceeded": LENGTH,
    "tool_use": TOOL_CALLS,
    "refusal": CONTENT_FILTER,
}


def _read_usage(usage: dict[str, Any], before: Usage | None) -> Usage:
    cached = usage.get("cache_read_input_tokens") or 0
    fresh = usage.get("input_tokens")
    prompt = None if fresh is None else fresh + cached + (usage.get("cache_creation_input_tokens") or 0)
    return Usage(
        prompt_tokens=prompt if prompt else before.prompt_tokens if before else prompt,
        completion_tokens=usage.get("output_tokens"),
        cached_tokens=cached or (before.cached_tokens if before else None),
    )


class AnthropicStream:
    """Bytes of an Anthropic message stream -> deltas; the whole reply at the end."""

    def __init__(self) -> None:
        self._parser = SSEParser()
        self._builder = ReplyBuilder()
        self._calls: dict[int, int] = {}  # block index -> position among the tool calls
        self.done = False

    @property
    def error(self) -> dict[str, Any] | None:
        return self._builder.error

    def feed(self, data: bytes) -> list[Delta]:
        """Raises: UpstreamError on an event that is not JSON."""
        return self._events(self._parser.feed(data))

    def finish(self) -> list[Delta]:
        return self._events(self._parser.finish())

    def reply(self) -> Reply:
        return self._builder.reply()

    def _events(self, events: list[Event]) -> list[Delta]:
        deltas = []
        for event in events:
            delta = self._read(decode_json(event.data))
            if delta is not None:
                self._builder.add(delta)
                deltas.append(delta)
        return deltas

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
            return Delta(usage=_read_usage(message.get("usage") or {}, None))
        if kind == "message_delta":
            said = body.get("delta") or {}
            reason = said.get("stop_reason")
            return Delta(
                finish_reason=_FINISH_REASONS.get(reason, reason),
                stop_sequence=said.get("stop_sequence"),
                usage=_read_usage(body.get("usage") or {}, self._builder.usage),
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
        said = body.get("delta") or {}
        kind = said.get("type")
        if kind == "text_delta":
            return Delta(text=said.get("text") or "")
        if kind == "thinking_delta":
            return Delta(reasoning=said.get("thinking") or "")
        if kind == "input_json_delta":
            position = self._calls.setdefault(body.get("index") or 0, len(self._calls))
            return Delta(tool_calls=[ToolDelta(index=position, arguments=said.get("partial_json") or "")])
        return None


def decode_reply(body: bytes) -> Reply:
    """A whole message -> canonical. Raises: UpstreamError when it is not one."""
    answer = decode_json(body)
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
    usage = _read_usage(answer.get("usage") or {}, None)
    builder.add(
        Delta(finish_reason=_FINISH_REASONS.get(reason, reason), stop_sequence=answer.get("stop_sequence"), usage=usage)
    )
    return builder.reply()
