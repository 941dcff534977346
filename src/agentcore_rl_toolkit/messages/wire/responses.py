"""OpenAI responses. Source: platform.openai.com/docs/api-reference/responses

A reference to an item of a recorded reply is resolved. References to whole responses and conversations are refused by name.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import KINDS, RequestError, openai_error, unsupported
from . import tool_forms
from .builder import CollectedCalls, encode_event
from .canonical import (
    CONTENT_FILTER,
    LENGTH,
    Delta,
    ModelRequest,
    ToolCall,
    ToolForm,
    Usage,
    joined,
    own_id,
    text_of,
    unreadable,
)
from .chat import tool_choice
from .fields import Fields, decode_body, text_member

# The assistant message of a recorded reply, by the part of the reply's id that its items' ids share. None: not recorded.
Recorded = Callable[[str], dict[str, Any] | None]


def parse_request(body: bytes | dict[str, Any], *, recorded: Recorded = lambda _: None) -> ModelRequest:
    """Read a responses request. Raises: RequestError that names the field."""
    data = decode_body(body) if isinstance(body, bytes) else body
    fields = Fields(data)
    messages: list[dict[str, Any]] = []
    forms: dict[str, ToolForm] = {}
    instructions = fields.take("instructions", str)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    lead = len(messages)
    asked = fields.need("input", str, list)
    left_out: Counter[str] = Counter()
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        messages += _input_messages(asked, recorded, left_out)
    if not messages:
        raise RequestError("input must not be empty", param="input")
    tools: list[dict[str, Any]] = []
    for path, tool in fields.tools():
        tools += tool_forms.functions(tool, path, forms)
    response_format = _text_format(fields.inside("text").take("format", dict))
    effort = fields.inside("reasoning").take("effort", str)
    includes = fields.strings("include")
    top = fields.integer("top_logprobs", 0, 20) or 0
    request = ModelRequest(
        dialect="responses",
        model=fields.take("model", str) or "",
        messages=messages,
        tools=tools,
        tool_choice=tool_choice(fields, tools, "name"),
        parallel_tool_calls=fields.take("parallel_tool_calls", bool),
        stream=fields.take("stream", bool) or False,
        include_usage=True,
        logprobs=bool(top) or "message.output_text.logprobs" in includes,
        top_logprobs=top,
        response_format=response_format,
        reasoning_effort=effort,
        template_kwargs=fields.template_kwargs(),
        sampling=fields.sampling(("max_output_tokens",)),
        forms=forms,
        lead=lead,
        left_out=left_out,
        echo_fields={name: data.get(name) for name in _ECHOED.split() if data.get(name) is not None},
    )
    request.unknown = fields.settle("responses")
    return request


_ECHOED = """
    instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text tool_choice tools top_p
    store user
"""


def _input_messages(items: list[Any], recorded: Recorded, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the canonical messages of input items. Items of other types are counted.

    One turn of the model comes back as several items (reasoning, message, function calls); they are joined into one
    assistant message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant message that items are being joined into

    def assistant(*, fresh: bool = False) -> dict[str, Any]:
        nonlocal turn
        if turn is None or fresh:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for i, item in enumerate(items):
        path = f"input[{i}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} must be an object", param=path)
        kind = str(item.get("type") or "message")
        if kind == "item_reference":
            item = _referenced(text_member(item, "id", path), path, recorded)
            if item is None:
                continue
            kind = item["type"]
        if kind == "message" and item.get("role") == "assistant":
            text = _content(item.get("content"), f"{path}.content", left_out)
            message = assistant(fresh=bool(turn and (turn["content"] or "tool_calls" in turn)))
            message["content"] = text
        elif kind == "message":
            turn = None
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise RequestError(f"{path}.role must be user, system, developer or assistant", param=f"{path}.role")
            messages.append({"role": role, "content": _content(item.get("content"), f"{path}.content", left_out)})
        elif kind == "reasoning":
            thought = _reasoning_text(item, left_out)
            message = assistant(fresh=bool(turn and (turn["content"] or "tool_calls" in turn)))
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif (called := tool_forms.call_of(item, path)) is not None:
            function = {"name": called[0], "arguments": called[1]}
            call = {"id": text_member(item, "call_id", path), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind in tool_forms.OUTPUTS:
            turn = None
            if item.get("output") is None:
                raise RequestError(f"{path}.output is required", param=f"{path}.output")
            content = _content(item["output"], f"{path}.output", left_out)
            messages.append({"role": "tool", "tool_call_id": text_member(item, "call_id", path), "content": content})
        else:
            left_out[kind] += 1
    return messages


# The kinds of output items, by the beginning of their ids. The items of each kind are numbered.
_REASONING, _MESSAGE, _CALL = "rs_", "msg_", "fc_"


def _referenced(item_id: str, path: str, recorded: Recorded) -> dict[str, Any] | None:
    """Return the output item with this id, as an agent would send it.

    A reply may have several items of text. Its record has their text in one piece, so the first item stands for all, and the
    others are None.
    Raises: RequestError.
    """
    kind = next((kind for kind in (_REASONING, _MESSAGE, _CALL) if item_id.startswith(kind)), "")
    reply, _, number = item_id.removeprefix(kind).rpartition("-")
    message = recorded(reply) if kind and number.isdecimal() else None
    calls = message.get("tool_calls") or [] if message is not None else []
    if message is None or (kind == _CALL and int(number) >= len(calls)):
        why = "no reply of this session has this item; let the client send whole items (`store: false`)"
        raise RequestError(f"{path}: {item_id[:80]!r} is unknown: {why}", param=f"{path}.id")
    if kind == _CALL:
        call = calls[int(number)]
        call_id = call.get("id") or own_id("call_", reply, int(number))
        return {"type": "function_call", "call_id": call_id, **call["function"]}
    if number != "0":
        return None
    if kind == _REASONING:
        return {"type": "reasoning", "content": message.get("reasoning_content") or message.get("reasoning") or ""}
    text = text_of(message.get("content")) or message.get("refusal") or ""
    return {"type": "message", "role": "assistant", "content": text}


# Nothing is secret here, but this is the member that clients carry from turn to turn: of a stream, langchain-openai keeps
# no other part of the reasoning.
_SEAL = "base64:"


def _sealed(text: str) -> str:
    return _SEAL + base64.b64encode(text.encode()).decode()


def _unsealed(value: Any, left_out: Counter[str]) -> str:
    """Return the reasoning in ``encrypted_content``. The reasoning of another provider is counted."""
    if isinstance(value, str) and value.startswith(_SEAL):
        try:
            return base64.b64decode(value[len(_SEAL) :], validate=True).decode()
        except (binascii.Error, ValueError):
            pass
    if value is not None:
        left_out["encrypted_content"] += 1
    return ""


def _reasoning_text(item: dict[str, Any], left_out: Counter[str]) -> str:
    parts = item.get("content")
    if not parts:
        parts = _unsealed(item.get("encrypted_content"), left_out) or item.get("summary")
    return text_of(parts) if isinstance(parts, str | list) else ""


def _content(content: Any, path: str, left_out: Counter[str]) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a string or a list of parts", param=path)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        where = f"{path}[{i}]"
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": str(part.get("text") or "")})
            if part.get("annotations"):
                left_out["annotations"] += 1
        elif kind == "refusal":
            parts.append({"type": "text", "text": str(part.get("refusal") or "")})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            image = {"url": part["image_url"]}
            if part.get("detail"):
                image["detail"] = part["detail"]
            parts.append({"type": "image_url", "image_url": image})
        elif isinstance(part, dict):
            parts.append(unreadable(kind, left_out))
        else:
            raise RequestError(f"{where} must be an object", param=where)
    return joined(parts)


def _text_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return {"type": "json_object"}
    if value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        raise unsupported("text.format.type", "it must be text, json_object or json_schema with a schema")
    schema = {k: v for k, v in value.items() if k in ("name", "schema", "strict", "description") and v is not None}
    return {"type": "json_schema", "json_schema": schema}


def usage_dict(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage()
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": prompt + completion,
    }


def response_head(request: ModelRequest, *, response_id: str, model: str, created: int) -> dict[str, Any]:
    """The members of a response object that do not depend on the answer."""
    echo = request.echo_fields
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": echo.get("instructions"),
        "max_output_tokens": echo.get("max_output_tokens"),
        "metadata": echo.get("metadata") or {},
        "model": model or request.model,
        "output": [],
        "parallel_tool_calls": echo.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": echo.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": echo.get("temperature"),
        "text": echo.get("text") or {"format": {"type": "text"}},
        "tool_choice": echo.get("tool_choice", "auto"),
        "tools": echo.get("tools") or [],
        "top_p": echo.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def closing(finish_reason: str | None) -> dict[str, Any]:
    """``status`` and ``incomplete_details`` for a finish reason."""
    if finish_reason == LENGTH:
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    if finish_reason == CONTENT_FILTER:
        return {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    return {"status": "completed", "incomplete_details": None}


@dataclass(slots=True)
class _Item:
    """A reasoning item or a message that is being written; ``kind`` is the type of its one part."""

    kind: str
    id: str
    output_index: int
    texts: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.output_index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        member = "refusal" if self.kind == "refusal" else "text"
        part: dict[str, Any] = {"type": self.kind, member: "".join(self.texts)}
        return part | {"annotations": [], "logprobs": self.entries} if self.kind == "output_text" else part

    def shown(self, status: str) -> dict[str, Any]:
        item = {"id": self.id, "status": status, "content": [] if status == "in_progress" else [self.part()]}
        if self.kind == "reasoning_text":
            text = "".join(self.texts)
            sealed = _sealed(text) if text else None
            return {**item, "type": "reasoning", "summary": [], "encrypted_content": sealed}
        return {**item, "type": "message", "role": "assistant"}


class Encoder:
    """Deltas -> the bytes of a response stream, and at the end the response itself. Only choice 0 exists in this dialect.

    The output is a list of items (reasoning, message, function calls), written one after the other, as clients expect:
    langchain-openai takes a change of item for a new one. Calls come whole, at the end (`CollectedCalls`). Every event carries
    a sequence number, and every ``done`` event repeats its deltas, so the text so far is kept.
    Source: platform.openai.com/docs/api-reference/responses-streaming
    """

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._id = own_id("resp_", reply_id)
        self._head = response_head(request, response_id=self._id, model=model, created=created or int(time.time()))
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._numbers: Counter[str] = Counter()  # of the items so far, by kind
        self._open: _Item | None = None
        self._calls = CollectedCalls()
        self._usage: Usage | None = None
        self._finish: str | None = None
        self.body: dict[str, Any] = {}  # after `finish`

    def start(self) -> bytes:
        return self._event("response.created", {"response": self._head}) + self.ping()

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.choice:
            return b""
        out = b""
        entries = (delta.logprob_entries or []) if self._request.logprobs else []
        pieces = (("reasoning_text", delta.reasoning), ("refusal", delta.refusal), ("output_text", delta.text))
        for kind, text in pieces:
            # A token may have no text, as the one that ends the reply; it belongs to the text that is being written.
            more = entries if kind == "output_text" and (text or self._writes(kind)) else []
            if text or more:
                out += self._piece(kind, text, more)
        self._calls.add(delta.tool_calls)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return out

    def ping(self) -> bytes:
        # Codex counts events, not bytes, as a sign of life; this one changes nothing that a client knows.
        return self._event("response.in_progress", {"response": self._head})

    def finish(self) -> bytes:
        end = closing(self._finish)
        status, calls = end["status"], self._calls.all()
        # Only the item that the answer ended in can be incomplete.
        out = self._close("completed" if calls else status)
        for place, call in enumerate(calls):
            out += self._write(call, place, "completed" if call is not calls[-1] else status)
        if not self._output:
            out += self._piece("output_text", "", []) + self._close(status)
        self.body = {**self._head, **end, "output": self._output, "usage": usage_dict(self._usage)}
        return out + self._event(f"response.{end['status']}", {"response": self.body})

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

    def _writes(self, kind: str) -> bool:
        return self._open is not None and self._open.kind == kind

    def _piece(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        """A piece of text, in the open item if that is of its kind, else in a new one."""
        out, item = b"", self._open
        if item is None or item.kind != kind:
            out = self._close()
            at, group = len(self._output), _REASONING if kind == "reasoning_text" else _MESSAGE
            item = _Item(kind, own_id(group, self._id, self._numbers[group]), at)
            self._numbers[group] += 1
            self._open = item
            self._output.append(item.shown("in_progress"))
            out += self._event("response.output_item.added", {"output_index": at, "item": self._output[-1]})
            out += self._event("response.content_part.added", {**item.place, "part": item.part()})
        item.texts.append(text)
        item.entries += entries
        more = {"logprobs": entries} if kind == "output_text" else {}
        return out + self._event(f"response.{kind}.delta", {**item.place, "delta": text, **more})

    def _close(self, status: str = "completed") -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        part, done = item.part(), item.shown(status)
        whole = {name: value for name, value in part.items() if name not in ("type", "annotations")}
        self._output[item.output_index] = done
        out = self._event(f"response.{item.kind}.done", {**item.place, **whole})
        out += self._event("response.content_part.done", {**item.place, "part": part})
        return out + self._event("response.output_item.done", {"output_index": item.output_index, "item": done})

    def _write(self, call: ToolCall, number: int, status: str) -> bytes:
        form, at = self._request.forms.get(call.name), len(self._output)
        item_id, call_id = own_id(_CALL, self._id, number), call.id or own_id("call_", self._id, number)
        empty = tool_forms.call_item(form, call_id, call.name, "", item_id, "in_progress")
        done = tool_forms.call_item(form, call_id, call.name, call.arguments, item_id, status)
        self._output.append(done)
        out = self._event("response.output_item.added", {"output_index": at, "item": empty})
        place = {"item_id": item_id, "output_index": at}
        function = done["type"] == "function_call"
        kind, member = ("function_call_arguments", "arguments") if function else ("custom_tool_call_input", "input")
        if done[member]:
            out += self._event(f"response.{kind}.delta", {**place, "delta": done[member]})
        named = {"name": done["name"]} if function else {}
        out += self._event(f"response.{kind}.done", {**place, **named, member: done[member]})
        return out + self._event("response.output_item.done", {"output_index": at, "item": done})
