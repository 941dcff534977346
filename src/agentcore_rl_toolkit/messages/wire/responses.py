"""OpenAI responses. Source: platform.openai.com/docs/api-reference/responses.

A reference to an item of a recorded reply is resolved. References to whole responses and conversations are refused by name.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import KINDS, NOT_JSON, RequestError, openai_error
from .arguments import value_of
from .canonical import CONTENT_FILTER, LENGTH, ModelRequest, ToolCall, ToolForm, Usage, own_id
from .fields import Members, Refusal, read_members
from .history import (
    History,
    Message,
    Part,
    image_part,
    joined,
    json_schema,
    object_of,
    read_each,
    text_member,
    text_of,
    text_part,
    tool_call,
    tool_choice,
)
from .stream import BlockEncoder, encode_event

# The assistant message of a recorded reply, by the part of the reply's id that its items' ids share. None: not recorded.
Recorded = Callable[[str], dict[str, Any] | None]

REFUSED = {
    "previous_response_id": Refusal("responses are not kept; send the whole input"),
    "conversation": Refusal("conversations are not kept; send the whole input"),
    "prompt": Refusal("there are no stored prompts; send the text as instructions or input"),
    "background": Refusal("answers are given at once; leave it out", (False,)),
}
_NAMES = {"max_output_tokens": "max_tokens"}


class _Text(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None


class _Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None


class _Responses(Members, kw_only=True):
    input: str | list[Any]
    instructions: str = ""
    tool_choice: str | dict[str, Any] = "auto"
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0


def parse_request(body: bytes | dict[str, Any], *, recorded: Recorded = lambda _: None) -> ModelRequest:
    """Read a responses request. Raises: RequestError that names the field."""
    asked, request = read_members(body, _Responses, "responses", names=_NAMES, refused=REFUSED)
    lead = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    history = _History(recorded)
    if isinstance(asked.input, str):
        history.messages.append({"role": "user", "content": asked.input})
    else:
        read_each(asked.input, "input", history.add)
    if not lead and not history.messages:
        raise RequestError("input must not be empty", param="input")
    request.messages = lead + history.messages
    read = functools.partial(_functions, forms=request.forms)
    request.tools = [function for tool in read_each(asked.tools, "tools", read) for function in tool]
    request.tool_choice = tool_choice(asked.tool_choice, request.tools, "name")
    request.logprobs = bool(asked.top_logprobs) or "message.output_text.logprobs" in (asked.include or ())
    request.top_logprobs = asked.top_logprobs
    shape = asked.text.format
    if shape is not None and shape.get("type") != "text":
        request.response_format = shape if shape == {"type": "json_object"} else json_schema(shape, "text.format.type")
    request.reasoning_effort = asked.reasoning.effort
    request.left_out = history.left_out
    return request


# -- tools

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _functions(tool: dict[str, Any], forms: dict[str, ToolForm]) -> list[dict[str, Any]]:
    """Return the functions that stand for a tool, none for a hosted one. ``forms`` gets the names of tools in other forms.

    Raises: RequestError.
    """
    kind = tool.get("type")
    if kind not in ("function", "custom", "namespace"):
        return []
    name = text_member(tool, "name")
    if kind == "namespace":
        return _flattened(tool, name, forms)
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    if kind == "custom":
        forms[name] = ToolForm(kind, name)
        shape, described = tool.get("format") or {}, str(tool.get("description") or "")
        if shape.get("definition"):
            described += f"\n\nThe input follows this grammar ({shape.get('syntax')}):\n{shape['definition']}"
        function = {"name": name, "description": described, "parameters": _INPUT}
    return [{"type": "function", "function": function}]


def _flattened(tool: dict[str, Any], namespace: str, forms: dict[str, ToolForm]) -> list[dict[str, Any]]:
    inner: dict[str, ToolForm] = {}
    found: list[dict[str, Any]] = []
    for each in tool.get("tools") or []:
        for function in _functions(object_of(each, "each tool of a namespace"), inner):
            name = function["function"]["name"]
            kind = inner[name].kind if name in inner else "function"
            flat = _flat_name(namespace, name)
            forms[flat] = ToolForm(kind, name, namespace)
            found.append({**function, "function": {**function["function"], "name": flat}})
    return found


def _flat_name(namespace: Any, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}" if isinstance(namespace, str) and namespace else name


def _call_item(form: ToolForm | None, call_id: str, call: ToolCall, item_id: str, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": item_id, "call_id": call_id, "status": status, "name": call.name}
    if form is not None:
        item["name"] = form.name
        if form.namespace is not None:
            item["namespace"] = form.namespace
    if form is None or form.kind == "function":
        return {**item, "type": "function_call", "arguments": call.arguments}
    try:
        read = value_of(call.arguments)
    except NOT_JSON:
        read = None
    text = read.get("input") if isinstance(read, dict) else None
    return {**item, "type": "custom_tool_call", "input": text if isinstance(text, str) else call.arguments}


# -- the history

# The kinds of output items, by the beginning of their ids. The items of each kind are numbered.
_REASONING, _MESSAGE, _CALL = "rs_", "msg_", "fc_"

# Nothing is secret here, but this is the member that clients carry from turn to turn: of a stream, langchain-openai keeps
# no other part of the reasoning.
_SEAL = "base64:"


class _History(History):
    """Joins the items of one turn of the model (reasoning, message, function calls) to one assistant message."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._recorded = recorded
        self._turn: Message | None = None  # the assistant message that items are being joined into

    def add(self, item: dict[str, Any]) -> None:
        """Read an item. Items of unknown types are counted. Raises: RequestError."""
        kind = str(item.get("type") or "message")
        if kind == "item_reference":
            found = self._referenced(text_member(item, "id"))
            if found is None:
                return
            item, kind = found, found["type"]
        if kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise RequestError(f"role must be user, system, developer or assistant, got {role!r}")
            self._end_turn({"role": role, "content": joined(self.parts(item.get("content")))})
        elif kind == "message":
            self._assistant(fresh=True)["content"] = joined(self.parts(item.get("content")))
        elif kind == "reasoning":
            thought, message = self._thought(item), self._assistant(fresh=True)
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind in ("function_call", "custom_tool_call"):
            name = _flat_name(item.get("namespace"), text_member(item, "name"))
            if kind == "custom_tool_call":
                arguments = json.dumps({"input": text_member(item, "input")}, ensure_ascii=False)
            else:
                arguments = text_member(item, "arguments") or "{}"
            call = tool_call(text_member(item, "call_id"), name, arguments)
            self._assistant().setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if "output" not in item:
                raise RequestError("output is required")
            content = joined(self.result_parts(item["output"]))
            self._end_turn({"role": "tool", "tool_call_id": text_member(item, "call_id"), "content": content})
        else:
            self.left_out[kind] += 1

    def _end_turn(self, message: Message) -> None:
        self._turn = None
        self.messages.append(message)

    def _assistant(self, *, fresh: bool = False) -> Message:
        """Return the turn's assistant message. With ``fresh``, add another one if it has a text or calls."""
        turn = self._turn
        if turn is None or (fresh and (turn["content"] or "tool_calls" in turn)):
            turn = self._turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
        return turn

    def part(self, kind: str, value: Any) -> list[Part] | None:
        if kind in ("input_text", "output_text", "text"):
            if value.get("annotations"):
                self.left_out["annotations"] += 1
            return [text_part(str(value.get("text") or ""))]
        if kind == "refusal":
            return [text_part(str(value.get("refusal") or ""))]
        if kind == "input_image":
            detail = {"detail": value["detail"]} if value.get("detail") else {}
            return [image_part({"url": value.get("image_url"), **detail})]
        return None

    def _thought(self, item: dict[str, Any]) -> str:
        """Return the reasoning in an item. Count the reasoning of another provider as left out."""
        sealed = item.get("encrypted_content")
        if item.get("content") or sealed is None:
            return text_of(item.get("content") or item.get("summary"))
        if isinstance(sealed, str) and sealed.startswith(_SEAL):
            try:
                return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
            except (binascii.Error, ValueError):
                pass
        self.left_out["encrypted_content"] += 1
        return text_of(item.get("summary"))

    def _referenced(self, item_id: str) -> dict[str, Any] | None:
        """Return the output item with this id, as an agent would send it.

        A reply may have several items of text. Its record has their text in one piece, so the first item stands for all, and
        the others are None.
        Raises: RequestError.
        """
        kind = next((kind for kind in (_REASONING, _MESSAGE, _CALL) if item_id.startswith(kind)), "")
        reply, _, number = item_id.removeprefix(kind).rpartition("-")
        message = self._recorded(reply) if kind and number.isdecimal() else None
        calls = message.get("tool_calls") or [] if message is not None else []
        if message is None or (kind == _CALL and int(number) >= len(calls)):
            why = "no reply of this session has this item; let the client send whole items (`store: false`)"
            raise RequestError(f"{item_id[:80]!r} is unknown: {why}")
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


# -- replies


def usage_dict(usage: Usage) -> dict[str, Any]:
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": prompt + completion,
    }


def error_dict(error: RequestError) -> dict[str, Any]:
    return openai_error(error, "input")


# Members that clients expect in each response. The settings of the request are not repeated.
_SETTINGS: dict[str, Any] = {
    **{"status": "in_progress", "error": None, "incomplete_details": None, "instructions": None, "metadata": {}},
    **{"output": [], "parallel_tool_calls": True, "previous_response_id": None, "reasoning": {"effort": None}},
    **{"temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None},
    **{"store": False, "background": False, "truncation": "disabled", "usage": None},
}
_INCOMPLETE = {LENGTH: "max_output_tokens", CONTENT_FILTER: "content_filter"}
_PARTS = {"reasoning": "reasoning_text", "text": "output_text"}  # keys are kinds of blocks


class Encoder(BlockEncoder):
    """Deltas -> the bytes of a response stream, and at the end the response itself.

    The blocks are items: langchain-openai takes a change of item for a new one. Every event carries a sequence number, and every
    ``done`` event repeats its deltas. Source: platform.openai.com/docs/api-reference/responses-streaming
    """

    def __init__(self, request: ModelRequest, **about: Any) -> None:
        super().__init__(request, **about)
        self._id = own_id("resp_", self.reply_id)
        self.body = {
            **{"id": self._id, "object": "response", "created_at": self.created or int(time.time())},
            **{"model": self.model, **_SETTINGS},
        }
        self._events = 0
        self._items: Counter[str] = Counter()  # keys are the beginnings of ids
        self._entries: list[dict[str, Any]] = []  # logprobs of the open item

    def start(self) -> bytes:
        return self._event("response.created", response=self.body) + self.ping()

    def ping(self) -> bytes:
        # Codex counts events, not bytes, as a sign of life; this one changes nothing that a client knows.
        return self._event("response.in_progress", response=self.body)

    def opened(self, kind: str) -> bytes:
        group = _REASONING if kind == "reasoning" else _MESSAGE
        item: dict[str, Any] = {"id": own_id(group, self._id, self._items[group]), "status": "in_progress"}
        self._items[group] += 1
        self._entries = []
        item["content"] = []
        if kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "encrypted_content": None}
        else:
            item |= {"type": "message", "role": "assistant"}
        self.content.append(item)
        return self._item("added", item) + self._at("response.content_part.added", part=self._part(kind, ""))

    def piece(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        self._entries += entries
        more = {"logprobs": entries} if kind == "text" else {}
        return self._at(f"response.{_PARTS[kind]}.delta", delta=text, **more)

    def closed(self, kind: str, text: str, *, last: bool) -> bytes:
        part, item = self._part(kind, text), self.content[-1]
        item |= {"status": self._status(last), "content": [part]}
        if kind == "reasoning" and text:
            item["encrypted_content"] = _SEAL + base64.b64encode(text.encode()).decode()
        whole = {name: value for name, value in part.items() if name not in ("type", "annotations")}
        out = self._at(f"response.{_PARTS[kind]}.done", **whole)
        return out + self._at("response.content_part.done", part=part) + self._item("done", item)

    def call(self, call: ToolCall, place: int, *, last: bool) -> bytes:
        form = self.request.forms.get(call.name)
        item_id, call_id = own_id(_CALL, self._id, place), call.id or own_id("call_", self._id, place)
        empty = _call_item(form, call_id, ToolCall(id="", name=call.name, arguments=""), item_id, "in_progress")
        done = _call_item(form, call_id, call, item_id, self._status(last))
        self.content.append(done)
        out = self._item("added", empty)
        at = {"item_id": item_id, "output_index": len(self.content) - 1}
        function = done["type"] == "function_call"
        kind, member = ("function_call_arguments", "arguments") if function else ("custom_tool_call_input", "input")
        if done[member]:
            out += self._event(f"response.{kind}.delta", **at, delta=done[member])
        named = {"name": done["name"]} if function else {}
        out += self._event(f"response.{kind}.done", **at, **named, **{member: done[member]})
        return out + self._item("done", done)

    def ended(self) -> bytes:
        reason = _INCOMPLETE.get(self.finish_reason or "")
        self.body |= {
            "status": self._status(True),
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self.content,
            "usage": usage_dict(self.usage),
        }
        return self._event(f"response.{self.body['status']}", response=self.body)

    def error(self, error: RequestError) -> bytes:
        """Encode an error after the stream began: the response ends as failed."""
        shown = {"code": error.code or KINDS[error.kind][1], "message": error.message}
        response = {**self.body, "status": "failed", "error": shown, "output": self.content}
        param = error_dict(error)["error"]["param"]
        return self._event("error", **shown, param=param) + self._event("response.failed", response=response)

    def _status(self, last: bool) -> str:
        """Return the status of an item. Only the last item of an answer can be incomplete."""
        return "incomplete" if last and self.finish_reason in _INCOMPLETE else "completed"

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self._entries} if kind == "text" else {}
        return {"type": _PARTS[kind], "text": text, **more}

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self.content) - 1, item=item)

    def _at(self, kind: str, **body: Any) -> bytes:
        """Encode an event about the only part of the open item."""
        at = len(self.content) - 1
        return self._event(kind, item_id=self.content[at]["id"], output_index=at, content_index=0, **body)

    def _event(self, kind: str, **body: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **body}
        self._events += 1
        return encode_event(event, kind)
