"""OpenAI responses: requests and whole answers. Source: platform.openai.com/docs/api-reference/responses

Nothing is stored between calls here, so whatever refers to an earlier response by id is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import RequestError, unsupported
from . import tool_forms
from .canonical import CONTENT_FILTER, LENGTH, UNREADABLE, Choice, ModelRequest, Reply, ToolForm, Usage, own_id
from .chat import tool_choice
from .fields import MAX_TOOLS, Fields, decode_body
from .fields import text_of as text_member

# Extra output that clients ask for as a matter of habit, and that is given anyway.
_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")


def parse_request(body: bytes | dict[str, Any]) -> ModelRequest:
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
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        messages += input_messages(asked, fields.ignored)
    if not messages:
        raise RequestError("input must not be empty", param="input")
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(fields.few("tools", MAX_TOOLS)):
        tools += tool_forms.functions(tool, f"tools[{i}]", forms, fields.ignored)
    text = fields.inside("text")
    response_format = _text_format(text.take("format", dict))
    text.rest()
    reasoning = fields.inside("reasoning")
    effort = reasoning.take("effort", str)
    reasoning.rest("summary", "generate_summary", "context")
    includes = fields.strings("include")
    fields.ignored += [f"include {name}" for name in includes if name not in _INCLUDES]
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
        echo_fields={name: data.get(name) for name in _ECHOED.split() if data.get(name) is not None},
    )
    request.unknown, request.ignored = fields.settle("responses"), fields.ignored
    return request


_ECHOED = """
    instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text tool_choice tools top_p
    store user
"""


def input_messages(items: list[Any], ignored: list[str]) -> list[dict[str, Any]]:
    """Input items -> canonical messages; ``ignored`` learns the types of those that are left out.

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
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") == "assistant":
            text = _content(item.get("content"), f"{path}.content")
            message = assistant(fresh=bool(turn and (turn["content"] or "tool_calls" in turn)))
            message["content"] = text
        elif kind == "message":
            turn = None
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise RequestError(f"{path}.role must be user, system, developer or assistant", param=f"{path}.role")
            messages.append({"role": role, "content": _content(item.get("content"), f"{path}.content")})
        elif kind == "reasoning":
            thought = _reasoning_text(item)
            message = assistant(fresh=bool(turn and (turn["content"] or "tool_calls" in turn)))
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif (called := tool_forms.call_of(item, path)) is not None:
            function = {"name": called[0], "arguments": called[1]}
            call = {"id": _call_id(item, path), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind in tool_forms.OUTPUTS:
            turn = None
            if item.get("output") is None:
                raise RequestError(f"{path}.output is required", param=f"{path}.output")
            content = _content(tool_forms.output_of(item), f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": _call_id(item, path), "content": content})
        else:
            summary = _unsealed(item.get("encrypted_content")) if kind.startswith("compaction") else ""
            if summary:
                turn = None
                messages.append({"role": "user", "content": summary})
            else:
                ignored.append(f"item {kind}")
    return messages


# Nothing is secret here, but this is the member that clients carry from turn to turn: of a stream, langchain-openai keeps
# no other part of the reasoning.
_SEAL = "base64:"


def _call_id(item: dict[str, Any], path: str) -> str:
    """A local shell's output names its call by ``id`` alone."""
    return text_member(item, "call_id" if item.get("call_id") is not None else "id", path)


def _sealed(text: str) -> str:
    return _SEAL + base64.b64encode(text.encode()).decode()


def _unsealed(value: Any) -> str:
    """The reasoning in ``encrypted_content``; nothing when it is another provider's."""
    if not isinstance(value, str) or not value.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(value[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _reasoning_text(item: dict[str, Any]) -> str:
    parts = item.get("content")
    if not parts:
        parts = _unsealed(item.get("encrypted_content")) or item.get("summary")
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        return ""
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _content(content: Any, path: str) -> str | list[dict[str, Any]]:
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
        elif kind == "refusal":
            parts.append({"type": "text", "text": str(part.get("refusal") or "")})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            image = {"url": part["image_url"]}
            if part.get("detail"):
                image["detail"] = part["detail"]
            parts.append({"type": "image_url", "image_url": image})
        elif isinstance(part, dict):
            parts.append({"type": "text", "text": UNREADABLE.format(kind)})
        else:
            raise RequestError(f"{where} must be an object", param=where)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


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
    prompt = (usage.prompt_tokens if usage else None) or 0
    completion = (usage.completion_tokens if usage else None) or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached if usage else 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": (usage.reasoning_tokens if usage else None) or 0},
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


def reasoning_item(text: str, item_id: str, status: str = "completed") -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": _sealed(text) if text else None,
        "status": status,
    }


def message_item(parts: list[dict[str, Any]], item_id: str, status: str = "completed") -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": parts}


def text_part(text: str, entries: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries or []}


def output_items(
    choice: Choice, reply_id: str, *, logprobs: bool, forms: Mapping[str, ToolForm]
) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(choice.reasoning, own_id("rs_", reply_id, 0)))
    parts = []
    if choice.content:
        parts.append(text_part(choice.content, choice.logprob_entries if logprobs else None))
    if choice.refusal:
        parts.append({"type": "refusal", "refusal": choice.refusal})
    if parts or not choice.tool_calls:
        items.append(message_item(parts or [text_part("")], own_id("msg_", reply_id, len(items))))
    for place, call in enumerate(choice.tool_calls):
        call_id = call.id or own_id("call_", reply_id, place)
        item_id = own_id("fc_", reply_id, len(items))
        items.append(tool_forms.call_item(forms.get(call.name), call_id, call.name, call.arguments, item_id))
    return items


def encode_reply(reply: Reply, request: ModelRequest) -> bytes:
    """The JSON body of a whole answer."""
    choice = reply.choices[0] if reply.choices else Choice()
    response_id, created = own_id("resp_", reply.id), reply.created or int(time.time())
    head = response_head(request, response_id=response_id, model=reply.model, created=created)
    end = closing(choice.finish_reason)
    output = output_items(choice, response_id, logprobs=request.logprobs, forms=request.forms)
    output[-1]["status"] = end["status"]  # a call that the answer broke off in has only the beginning of its arguments
    body = {
        **head,
        **end,
        "output": output,
        "usage": usage_dict(reply.usage),
    }
    return msgspec.json.encode(body)
