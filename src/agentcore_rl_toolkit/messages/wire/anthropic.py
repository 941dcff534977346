"""Anthropic messages. Source: docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import msgspec

from ..errors import NOT_JSON, RequestError, anthropic_error, no_threads, unsupported
from .arguments import standard, value_of
from .builder import CollectedCalls, encode_event
from .canonical import (
    CONTENT_FILTER,
    LENGTH,
    STOP,
    TOOL_CALLS,
    Delta,
    ModelRequest,
    Usage,
    joined,
    own_id,
    text_of,
    unreadable,
)
from .chat import named_tool
from .fields import Fields, decode_body, text_member

# Claude Code opens its system prompt with it; parts of it change from call to call and from agent to agent.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_FAILED = "The tool failed and said nothing."

# Clients drop reasoning that carries no signature from the history they send back; this one is never checked.
SIGNATURE = "c2VsZi1ob3N0ZWQ="

_STOP_REASONS = {STOP: "end_turn", LENGTH: "max_tokens", TOOL_CALLS: "tool_use", CONTENT_FILTER: "refusal"}


def parse_request(body: bytes | dict[str, Any], *, counting: bool = False) -> ModelRequest:
    """Read a messages request; ``counting`` for ``/v1/messages/count_tokens``, where max_tokens is not needed.

    Raises: RequestError that names the field.
    """
    fields = Fields(decode_body(body) if isinstance(body, bytes) else body)
    messages: list[dict[str, Any]] = []
    system = fields.either("system", str, list)
    if system:
        texts = [system] if isinstance(system, str) else _text_blocks(system, "system")
        kept = [text for text in (_BILLING.sub("", text) for text in texts) if text]
        if kept:
            messages.append({"role": "system", "content": "\n".join(kept)})
    lead = len(messages)
    asked = fields.need("messages", list)
    if not asked:
        raise RequestError("messages must not be empty", param="messages")
    left_out: Counter[str] = Counter()
    for i, message in enumerate(asked):
        messages += _message(message, f"messages[{i}]", left_out)
    if messages[-1]["role"] == "assistant":
        raise unsupported(
            f"messages[{len(asked) - 1}]", "an answer cannot be begun for the model; end with a user message"
        )
    tools: list[dict[str, Any]] = []
    for path, tool in fields.tools():
        tools += _tool(tool, path)
    choice, parallel = _tool_choice(fields.take("tool_choice", dict), tools)
    template_kwargs = _thinking(fields)
    effort, output_format = _output(fields)
    _edits_nothing(fields)
    if fields.take("thread", dict) is not None:
        raise no_threads()
    sampling = fields.sampling(("max_tokens",), "stop_sequences", max_temperature=1.0)
    if sampling.max_tokens is None and not counting:
        raise RequestError("max_tokens is required", param="max_tokens")
    request = ModelRequest(
        dialect="anthropic",
        model=fields.take("model", str) or "",
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        stream=fields.take("stream", bool) or False,
        include_usage=True,
        sampling=sampling,
        response_format=output_format,
        reasoning_effort=effort,
        template_kwargs=template_kwargs,
        lead=lead,
        left_out=left_out,
    )
    request.unknown = fields.settle("anthropic")
    return request


def _edits_nothing(fields: Fields) -> None:
    """Take edits that keep all. Raises: RequestError for one that would change the history."""
    edits = fields.inside("context_management").take("edits", list) or []
    if any(not isinstance(edit, dict) or edit.get("keep") != "all" for edit in edits):
        why = "the gateway does not edit the history: leave out edits that clear it, or clear it in the agent"
        raise unsupported("context_management", why)


def _thinking(fields: Fields) -> dict[str, Any]:
    """The template's switch, under the name that Qwen's and GLM's templates use.

    A budget is taken and not held: an engine would write the end of the thinking itself, which the policy did not sample.
    """
    inner = fields.inside("thinking")
    if not inner:
        return {}
    kind = inner.need("type", str)
    if kind not in ("enabled", "disabled", "adaptive"):
        raise unsupported("thinking.type", "it must be enabled, disabled or adaptive")
    inner.integer("budget_tokens", 0)
    return {"enable_thinking": kind != "disabled"}


def _output(fields: Fields) -> tuple[str | None, dict[str, Any] | None]:
    config = fields.inside("output_config")
    effort = config.take("effort", str)
    shape = config.take("format", dict) or fields.take("output_format", dict)
    if shape is None:
        return effort, None
    if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise unsupported("output_config.format", "it must be a json_schema with a schema")
    schema = {"name": "output", "schema": shape["schema"], "strict": True}
    return effort, {"type": "json_schema", "json_schema": schema}


def _text_blocks(blocks: list[Any], path: str) -> list[str]:
    texts = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise unsupported(f"{path}[{i}]", "only text blocks are taken here")
        texts.append(block["text"])
    return texts


def _message(message: Any, path: str, left_out: Counter[str]) -> list[dict[str, Any]]:
    """One Anthropic message -> canonical ones: tool results become messages of their own, in front of the user's
    text.
    """
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{path}.role must be user, assistant or system", param=f"{path}.role")
    role = message["role"]
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{path}.content must be a string or a list of blocks", param=f"{path}.content")
    if role == "assistant":
        return [_assistant(content, path, left_out)]
    if role == "system":
        return [{"role": "system", "content": "\n".join(_text_blocks(content, f"{path}.content"))}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(_tool_result(block, where, left_out))
        else:
            parts += _user_parts([block], where, left_out)
    if parts or not results:
        results.append({"role": role, "content": joined(parts, "\n")})
    return results


def _tool_result(block: dict[str, Any], path: str, left_out: Counter[str]) -> dict[str, Any]:
    """Return a tool's message. No chat template reads ``is_error``, so a failure without a text gets one: it would look like a
    success that found nothing.
    """
    call_id = text_member(block, "tool_use_id", path)
    content = joined(_user_parts(block.get("content"), f"{path}.content", left_out), "\n")
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise RequestError(f"{path}.is_error must be true or false", param=f"{path}.is_error")
    if failed and not text_of(content).strip():
        content = _FAILED
    elif failed:
        left_out["is_error"] += 1
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _user_parts(content: Any, path: str, left_out: Counter[str]) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a string or a list of blocks", param=path)
    parts: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": _image_url(block.get("source") or {}, path)}})
        elif kind == "tool_reference":
            parts.append({"type": "text", "text": f"The tool {block.get('tool_name')} is available now."})
        elif kind in ("document", "search_result"):
            parts += _document(block, path, left_out)
        elif kind is not None and kind != "text":
            parts.append(unreadable(kind, left_out))
        else:
            raise RequestError(f"{path} must be a list of blocks, text blocks with a text", param=path)
    return parts


def _document(block: dict[str, Any], path: str, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the texts of a document, its title and context first. A document that is no text (a PDF) becomes a line."""
    source = block["source"] if isinstance(block.get("source"), dict) else {}
    heads = [block.get("title"), block.get("context")]
    found: list[dict[str, Any]] = [{"type": "text", "text": text} for text in heads if isinstance(text, str)]
    if block["type"] == "search_result":
        return [*found, *_user_parts(block.get("content"), path, left_out)]
    kind = source.get("type", "document")
    if kind == "text" and isinstance(source.get("data"), str):
        return [*found, {"type": "text", "text": source["data"]}]
    if kind == "content":
        return [*found, *_user_parts(source.get("content"), f"{path}.source.content", left_out)]
    left_out["document"] += 1
    media = source.get("media_type", kind)
    why = f"[document ({media}): the model reads text only; extract the text with another tool]"
    return [*found, {"type": "text", "text": why}]


def _image_url(source: Any, path: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    if kind == "url":
        return str(source.get("url"))
    raise unsupported(f"{path}.source", f"image sources of type {kind!r} are not taken")


def _assistant(content: list[Any], path: str, left_out: Counter[str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(str(block.get("text") or ""))
            if block.get("citations"):
                left_out["citations"] += 1
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            # An object here, text in a chat body: with the blanks that models and chat templates write, so that an
            # engine that passes the text on sees the tokens it sampled.
            given = block.get("input") or {}
            if not isinstance(given, dict):
                raise RequestError(f"{where}.input must be an object", param=f"{where}.input")
            function = {"name": text_member(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": text_member(block, "id", where), "type": "function", "function": function})
        elif kind is None:
            raise RequestError(f"{where}.type is required", param=f"{where}.type")
        else:
            left_out[str(kind)] += 1  # another provider's reasoning, or a call of its own tools
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The function that the model is given; nothing for a tool of the provider's own."""
    if tool.get("type", "custom") not in ("custom", None):
        return []
    function: dict[str, Any] = {"name": text_member(tool, "name", path)}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return [{"type": "function", "function": function}]


def _tool_choice(choice: dict[str, Any] | None, tools: list[dict[str, Any]]) -> tuple[str, bool | None]:
    if choice is None:
        return "auto", None
    kind = choice.get("type")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    if kind in ("auto", "none"):
        return kind, parallel
    if kind == "any":
        if not tools:
            raise RequestError("tool_choice 'any' needs tools", param="tool_choice")
        return "required", parallel
    if kind == "tool":
        return named_tool(choice.get("name"), tools, "tool_choice.name"), parallel
    raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", param="tool_choice.type")


def named_stop(stop_sequence: str | None, request: ModelRequest) -> str | None:
    """The stop string if it is one of the agent's; SGLang also tells of those that its own templates end with."""
    return stop_sequence if stop_sequence in request.sampling.stop else None


def stop_reason(choice_finish: str | None, stop_sequence: str | None) -> str:
    """The provider's word for a canonical finish reason."""
    if stop_sequence is not None and choice_finish == STOP:
        return "stop_sequence"
    return _STOP_REASONS.get(choice_finish or STOP, "end_turn")


def usage_dict(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage()
    return {
        # This provider counts cached tokens apart from the others.
        "input_tokens": (usage.prompt_tokens or 0) - usage.cached,
        "output_tokens": usage.completion_tokens or 0,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
    }


def tool_input(arguments: str) -> Any:
    """Tool arguments as the object this dialect wants, with strings for numbers that JSON does not have (`arguments`).
    What is not an object cannot be shown as one: it goes under "_raw".
    """
    try:
        decoded = value_of(arguments)
    except NOT_JSON:
        return {"_raw": arguments}
    return decoded if isinstance(decoded, dict) else {"_raw": decoded}


def encode_count(input_tokens: int) -> bytes:
    """The answer of ``/v1/messages/count_tokens``."""
    return msgspec.json.encode({"input_tokens": input_tokens})


def _event(name: str, body: dict[str, Any]) -> bytes:
    return encode_event(msgspec.json.encode({"type": name, **body}), name)


class Encoder:
    """Deltas -> the bytes of a message stream, and at the end the message itself. Only choice 0 exists in this dialect.

    Content comes in blocks, one open at a time: thinking, text, then the calls, whole at the end (`CollectedCalls`). A delta of
    another kind than the open block closes it and opens the next. ``input_tokens`` is known only when the engine tells: at the
    start if the prompt was counted here, else at the end. Source: docs.anthropic.com/en/api/messages-streaming
    """

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._usage = request.counted or Usage()
        self._kind: str | None = None
        self._content: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open block's text
        self._calls = CollectedCalls()
        self._finish: str | None = None
        self._stop_sequence: str | None = None
        self.body: dict[str, Any] = {  # whole after `finish`
            "id": own_id("msg_", reply_id),
            "type": "message",
            "role": "assistant",
            "model": model or request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_dict(self._usage),
        }

    def start(self) -> bytes:
        return _event("message_start", {"message": self.body})

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.choice:
            return b""
        out = b""
        if delta.reasoning:
            out += self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._delta("thinking_delta", "thinking", delta.reasoning)
        text = delta.text or delta.refusal
        if text:
            out += self._into("text", {"type": "text", "text": ""})
            out += self._delta("text_delta", "text", text)
        self._calls.add(delta.tool_calls)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            self._stop_sequence = named_stop(delta.stop_sequence, self._request)
        return out

    def ping(self) -> bytes:
        return _event("ping", {})

    def finish(self) -> bytes:
        out = self._close()
        for place, call in enumerate(self._calls.all()):
            call_id = call.id or own_id("toolu_", self.body["id"], place)
            out += self._open("tool_use", {"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
            if call.arguments:
                out += self._delta("input_json_delta", "partial_json", standard(call.arguments))
            out += self._close()
            self._content[-1] = {**self._content[-1], "input": tool_input(call.arguments)}
        reason = {
            "stop_reason": stop_reason(self._finish, self._stop_sequence),
            "stop_sequence": self._stop_sequence,
        }
        usage = usage_dict(self._usage)
        self.body |= {"content": self._content, **reason, "usage": usage}
        return out + _event("message_delta", {"delta": reason, "usage": usage}) + _event("message_stop", {})

    def error(self, error: RequestError) -> bytes:
        """An error after the stream began."""
        return encode_event(msgspec.json.encode(anthropic_error(error)), "error")

    def _into(self, kind: str, empty: dict[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        return self._close() + self._open(kind, empty)

    def _open(self, kind: str, empty: dict[str, Any]) -> bytes:
        self._kind = kind
        self._content.append(empty)
        return _event("content_block_start", {"index": len(self._content) - 1, "content_block": empty})

    def _delta(self, kind: str, member: str, piece: str) -> bytes:
        if member == self._kind:
            self._pieces.append(piece)
        return _event("content_block_delta", {"index": len(self._content) - 1, "delta": {"type": kind, member: piece}})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        out, block = b"", self._content[-1]
        if self._kind in block:
            block[self._kind], self._pieces = "".join(self._pieces), []
        if self._kind == "thinking":
            block["signature"] = SIGNATURE
            out = self._delta("signature_delta", "signature", SIGNATURE)
        self._kind = None
        return out + _event("content_block_stop", {"index": len(self._content) - 1})
