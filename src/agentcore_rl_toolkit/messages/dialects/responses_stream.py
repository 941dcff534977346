"""OpenAI response streams. Source: platform.openai.com/docs/api-reference/responses-streaming

Theory of operation of the encoder: the output is a list of items (reasoning, message, function calls), written one
after the other, as clients expect: langchain-openai takes a change of item for a new one. Calls come whole, at the end
(`CollectedCalls`). Every event carries a sequence number, and every ``done`` event repeats its deltas, so the text so far
is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import KINDS, RequestError, openai_error
from .builder import CollectedCalls, encode_event
from .canonical import Delta, ModelRequest, ToolCall, Usage, own_id
from .responses import (
    closing,
    message_item,
    reasoning_item,
    response_head,
    text_part,
    usage_dict,
)
from .tool_forms import call_item


@dataclass(slots=True)
class _Item:
    kind: str
    id: str
    output_index: int
    text: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)


class Encoder:
    """Deltas -> the bytes of a response stream. Only choice 0 exists in this dialect."""

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._id = own_id("resp_", reply_id)
        self._head = response_head(request, response_id=self._id, model=model, created=created or int(time.time()))
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._calls = CollectedCalls()
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
        entries = delta.logprob_entries if self._request.logprobs else None
        if delta.text:
            out += self._into("text")
        # A token may have no text, as the one that ends the reply; it belongs to the text that is being written.
        if delta.text or (entries and self._open is not None and self._open.kind == "text"):
            out += self._piece("response.output_text.delta", delta.text, logprobs=entries or [])
            assert self._open is not None
            self._open.entries += entries or []
        self._calls.add(delta.tool_calls)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return out

    def finish(self) -> bytes:
        end = closing(self._finish)
        status, calls = end["status"], self._calls.all()
        # Only the item that the answer ended in can be incomplete.
        out = self._close("completed" if calls else status)
        for place, call in enumerate(calls):
            out += self._write(call, place, "completed" if call is not calls[-1] else status)
        if not self._output:
            out += self._into("text") + self._close(status)
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
        return self._event("error", {**openai_error(error, "responses")["error"], "code": code}) + self._event(
            "response.failed", {"response": response}
        )

    def _event(self, kind: str, body: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **body}
        self._number += 1
        return encode_event(msgspec.json.encode(event), kind)

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.output_index}

    def _into(self, kind: str) -> bytes:
        if self._open is not None and self._open.kind == kind:
            return b""
        out = self._close()
        place = len(self._output)
        item = _Item(kind, own_id("rs_" if kind == "reasoning" else "msg_", self._id, place), place)
        self._open = item
        if kind == "reasoning":
            empty = {**reasoning_item("", item.id), "content": [], "status": "in_progress"}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            empty = message_item([], item.id, "in_progress")
            part = text_part("") if kind == "text" else {"type": "refusal", "refusal": ""}
        self._output.append(empty)
        out += self._event("response.output_item.added", {"output_index": item.output_index, "item": empty})
        return out + self._event("response.content_part.added", {**self._place(item), "content_index": 0, "part": part})

    def _piece(self, kind: str, text: str, **more: Any) -> bytes:
        item = self._open
        assert item is not None
        item.text += text
        return self._event(kind, {**self._place(item), "content_index": 0, "delta": text, **more})

    def _close(self, status: str = "completed") -> bytes:
        item = self._open
        if item is None:
            return b""
        self._open = None
        place = {**self._place(item), "content_index": 0}
        if item.kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": item.text}
            out = self._event("response.reasoning_text.done", {**place, "text": item.text})
            done = reasoning_item(item.text, item.id, status)
        elif item.kind == "refusal":
            part = {"type": "refusal", "refusal": item.text}
            out = self._event("response.refusal.done", {**place, "refusal": item.text})
            done = message_item([part], item.id, status)
        else:
            part = text_part(item.text, item.entries)
            out = self._event("response.output_text.done", {**place, "text": item.text, "logprobs": item.entries})
            done = message_item([part], item.id, status)
        out += self._event("response.content_part.done", {**place, "part": part})
        self._output[item.output_index] = done
        return out + self._event("response.output_item.done", {"output_index": item.output_index, "item": done})

    def _write(self, call: ToolCall, place: int, status: str) -> bytes:
        form = self._request.forms.get(call.name)
        call_id = call.id or own_id("call_", self._id, place)
        item = _Item("call", own_id("fc_", self._id, len(self._output)), len(self._output))
        empty = call_item(form, call_id, call.name, "", item.id, "in_progress")
        done = call_item(form, call_id, call.name, call.arguments, item.id, status)
        self._output.append(done)
        out = self._event("response.output_item.added", {"output_index": item.output_index, "item": empty})
        kind, shown = "custom_tool_call_input", {"input": done["input"]} if "input" in done else {}
        if "arguments" in done:
            kind, shown = "function_call_arguments", {"name": done["name"], "arguments": call.arguments}
        text = shown.get("arguments", shown.get("input"))
        if text:
            out += self._event(f"response.{kind}.delta", {**self._place(item), "delta": text})
        if shown:
            out += self._event(f"response.{kind}.done", {**self._place(item), **shown})
        return out + self._event("response.output_item.done", {"output_index": item.output_index, "item": done})
