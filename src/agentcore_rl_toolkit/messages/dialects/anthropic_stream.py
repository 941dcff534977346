"""Anthropic message streams. Source: docs.anthropic.com/en/api/messages-streaming

Theory of operation of the encoder: content comes in blocks, one open at a time: thinking, text, then one per tool
call, whole at the end (`CollectedCalls`). A delta of another kind than the open block closes it and opens the next.
``input_tokens`` is known only when the engine tells: at the start if the prompt was counted here, else at the end.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import RequestError, anthropic_error
from .anthropic import SIGNATURE, named_stop, stop_reason, usage_dict
from .arguments import standard
from .builder import CollectedCalls, encode_event
from .canonical import Delta, ModelRequest, Usage, own_id


def _event(name: str, body: dict[str, Any]) -> bytes:
    return encode_event(msgspec.json.encode({"type": name, **body}), name)


class Encoder:
    """Deltas -> the bytes of a message stream. Only choice 0 exists in this dialect."""

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._id = own_id("msg_", reply_id)
        self._model = model or request.model
        self._usage = request.counted or Usage()
        self._kind: str | None = None
        self._block = -1
        self._calls = CollectedCalls()
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
        self._calls.add(delta.tool_calls)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            self._stop_sequence = named_stop(delta.stop_sequence, self._request)
        return out

    def finish(self) -> bytes:
        out = self._close()
        for place, call in enumerate(self._calls.all()):
            call_id = call.id or own_id("toolu_", self._id, place)
            out += self._open("tool_use", {"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
            if call.arguments:
                out += self._delta({"type": "input_json_delta", "partial_json": standard(call.arguments)})
            out += self._close()
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
