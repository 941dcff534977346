"""OpenAI response streams, both ways. Source: platform.openai.com/docs/api-reference/responses-streaming

Theory of operation of the encoder: the output is a list of items (reasoning, message, function calls), written one
after the other, as clients expect (langchain-openai takes a change of item for a new one). Calls that an engine writes
side by side wait until the first is whole, which only the end of the reply tells. Every event carries a sequence
number, and every ``done`` event repeats what its deltas said, so the text so far is kept."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from .builder import ReplyBuilder
from .canonical import CONTENT_FILTER, LENGTH, STOP, TOOL_CALLS, Delta, Reply, Request, ToolDelta, Usage, new_id
from .errors import KINDS, RequestError
from .openai_stream import decode_json
from .responses import (
    call_item,
    closing,
    message_item,
    reasoning_item,
    response_head,
    response_id,
    text_part,
    usage_dict,
)
from .sse import Event, SSEParser, encode_event


class _Item:
    __slots__ = ("call_id", "entries", "id", "kind", "name", "output_index", "text")

    def __init__(self, kind: str, item_id: str, output_index: int) -> None:
        self.kind = kind
        self.id = item_id
        self.output_index = output_index
        self.text = ""
        self.call_id = ""
        self.name = ""
        self.entries: list[dict[str, Any]] = []


class Encoder:
    """Deltas -> the bytes of a response stream. Only choice 0 exists in this dialect."""

    content_type = "text/event-stream"

    def __init__(self, request: Request, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._head = response_head(
            request, response_id=response_id(reply_id), model=model, created=created or int(time.time())
        )
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._waiting: dict[int, list[ToolDelta]] = {}
        self._usage: Usage | None = None
        self._finish: str | None = None

    def start(self) -> bytes:
        return self._event("response.created", {"response": self._head}) + self._event(
            "response.in_progress", {"response": self._head}
        )

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.choice:
            return b""
        out = b""
        if delta.reasoning:
            out += self._into("reasoning")
            out += self._piece("response.reasoning_text.delta", delta.reasoning)
        if delta.refusal:
            out += self._into("refusal")
            out += self._piece("response.refusal.delta", delta.refusal)
        if delta.text:
            out += self._into("text")
            entries = delta.logprob_entries if self._request.logprobs else None
            out += self._piece("response.output_text.delta", delta.text, logprobs=entries or [])
            assert self._open is not None
            self._open.entries += entries or []
        for piece in delta.tool_calls:
            if self._calls and piece.index not in self._calls:
                self._waiting.setdefault(piece.index, []).append(piece)
            else:
                out += self._call(piece)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return out

    def finish(self) -> bytes:
        out = self._close()
        for item in self._calls.values():
            out += self._close_call(item)
        for index, pieces in sorted(self._waiting.items()):
            out += b"".join(map(self._call, pieces)) + self._close_call(self._calls[index])
        if not self._output:
            out += self._into("text") + self._close()
        end = closing(self._finish)
        response = {**self._head, **end, "output": self._output, "usage": usage_dict(self._usage)}
        return out + self._event(f"response.{end['status']}", {"response": response})

    def error(self, error: RequestError) -> bytes:
        """An error after the stream began: the response ends as failed."""
        code = error.code or KINDS[error.kind][1]
        response = {
            **self._head,
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": self._output,
        }
        return self._event("error", {"code": code, "message": error.message, "param": error.param}) + self._event(
            "response.failed", {"response": response}
        )

    def _event(self, kind: str, body: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **body}
        self._number += 1
        return encode_event(msgspec.json.encode(event), kind)

    def _add(self, item: dict[str, Any]) -> int:
        self._output.append(item)
        return len(self._output) - 1

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.output_index}

    def _into(self, kind: str) -> bytes:
        if self._open is not None and self._open.kind == kind:
            return b""
        out = self._close()
        item = _Item(kind, new_id("rs_" if kind == "reasoning" else "msg_"), len(self._output))
        self._open = item
        if kind == "reasoning":
            empty = {**reasoning_item("", item.id), "content": [], "status": "in_progress"}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            empty = message_item([], item.id, "in_progress")
            part = text_part("") if kind == "text" else {"type": "refusal", "refusal": ""}
        self._add(empty)
        out += self._event("response.output_item.added", {"output_index": item.output_index, "item": empty})
        return out + self._event("response.content_part.added", {**self._place(item), "content_index": 0, "part": part})

    def _piece(self, kind: str, text: str, **more: Any) -> bytes:
        item = self._open
        assert item is not None
        item.text += text
        return self._event(kind, {**self._place(item), "content_index": 0, "delta": text, **more})

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        self._open = None
        place = {**self._place(item), "content_index": 0}
        if item.kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": item.text}
            out = self._event("response.reasoning_text.done", {**place, "text": item.text})
            done = reasoning_item(item.text, item.id)
        elif item.kind == "refusal":
            part = {"type": "refusal", "refusal": item.text}
            out = self._event("response.refusal.done", {**place, "refusal": item.text})
            done = message_item([part], item.id)
        else:
            part = text_part(item.text, item.entries)
            out = self._event("response.output_text.done", {**place, "text": item.text, "logprobs": item.entries})
            done = message_item([part], item.id)
        out += self._event("response.content_part.done", {**place, "part": part})
        self._output[item.output_index] = done
        return out + self._event("response.output_item.done", {"output_index": item.output_index, "item": done})

    def _call(self, piece: ToolDelta) -> bytes:
        item = self._calls.get(piece.index)
        out = b""
        if item is None:
            out += self._close()
            item = _Item("call", new_id("fc_"), len(self._output))
            item.call_id = piece.id or new_id("call_")
            item.name = piece.name or ""
            self._calls[piece.index] = item
            empty = call_item(item.call_id, item.name, "", item.id, "in_progress")
            self._add(empty)
            out += self._event("response.output_item.added", {"output_index": item.output_index, "item": empty})
        elif piece.name:
            item.name += piece.name
        if piece.arguments:
            item.text += piece.arguments
            out += self._event(
                "response.function_call_arguments.delta", {**self._place(item), "delta": piece.arguments}
            )
        return out

    def _close_call(self, item: _Item) -> bytes:
        done = call_item(item.call_id, item.name, item.text, item.id)
        self._output[item.output_index] = done
        out = self._event(
            "response.function_call_arguments.done",
            {**self._place(item), "name": item.name, "arguments": item.text},
        )
        return out + self._event("response.output_item.done", {"output_index": item.output_index, "item": done})


def _read_usage(usage: Any) -> Usage | None:
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


class ResponsesStream:
    """Bytes of a response stream -> deltas; the whole reply at the end."""

    def __init__(self) -> None:
        self._parser = SSEParser()
        self._builder = ReplyBuilder()
        self._calls: dict[int, int] = {}  # output index -> position among the calls
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
            if event.data == b"[DONE]":
                continue
            delta = self._read(decode_json(event.data))
            if delta is not None:
                self._builder.add(delta)
                deltas.append(delta)
        return deltas

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
        return Delta(finish_reason=finish, usage=_read_usage(response.get("usage")))


def decode_reply(body: bytes) -> Reply:
    """A whole response object -> canonical. Raises: UpstreamError when it is not one."""
    answer = decode_json(body)
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
    builder.add(Delta(finish_reason=_finish_reason(answer, calls=calls > 0), usage=_read_usage(answer.get("usage"))))
    return builder.reply()
