"""OpenAI chat completions. Source: platform.openai.com/docs/api-reference/chat; token fields as in vLLM's server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import RequestError, openai_error, unsupported
from .builder import encode_event
from .canonical import (
    Delta,
    ModelRequest,
    Reply,
    ToolDelta,
    Usage,
    joined,
    text_of,
    unreadable,
)
from .fields import Fields, decode_body

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse_request(body: bytes | dict[str, Any]) -> ModelRequest:
    """Read a chat completion request. Raises: RequestError that names the field."""
    fields = Fields(decode_body(body) if isinstance(body, bytes) else body)
    left_out: Counter[str] = Counter()
    messages = [_message(m, f"messages[{i}]", left_out) for i, m in enumerate(fields.need("messages", list))]
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    tools, tool_choice, parallel = parse_tools(fields)
    stream = fields.take("stream", bool) or False
    stream_options = fields.take("stream_options", dict) or {}
    request = ModelRequest(
        dialect="chat",
        model=fields.take("model", str) or "",
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        stream=stream,
        include_usage=bool(stream_options.get("include_usage")),
        n=fields.integer("n", 1, 128) or 1,
        logprobs=fields.take("logprobs", bool) or False,
        top_logprobs=fields.integer("top_logprobs", 0, 20) or 0,
        response_format=_response_format(fields.take("response_format", dict)),
        reasoning_effort=fields.take("reasoning_effort", str),
        template_kwargs=fields.template_kwargs(),
        sampling=fields.sampling(("max_completion_tokens", "max_tokens")),
        left_out=left_out,
    )
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    request.unknown = fields.settle("chat")
    return request


def _message(message: Any, path: str, left_out: Counter[str]) -> dict[str, Any]:
    """Return a message in canonical shape. Unknown members stay: the chat template may read them."""
    if not isinstance(message, dict):
        raise RequestError(f"{path} must be an object", param=path)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{path}.role")
    if role == "function":
        raise unsupported(f"{path}.role", "send tool results with the role 'tool'")
    if message.get("function_call") is not None:
        raise unsupported(f"{path}.function_call", "send calls as tool_calls")
    canonical: dict[str, Any] = dict(message)
    content = message.get("content")
    thoughts: list[str] = []
    if content is not None and not isinstance(content, str):
        parts: list[dict[str, Any]] = []
        for i, part in enumerate(_as_list(content, f"{path}.content")):
            kind = part.get("type") if isinstance(part, dict) else None
            if role == "assistant" and kind in _THINKING:
                thoughts.append(_thought(part, left_out))
            else:
                parts.append(_part(part, f"{path}.content[{i}]", left_out))
        canonical["content"] = joined(parts)
    if message.get("tool_calls"):
        listed = _as_list(message["tool_calls"], f"{path}.tool_calls")
        canonical["tool_calls"] = [_check_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(listed)]
    if role == "assistant":
        _keep_reasoning(canonical, thoughts, left_out)
    return canonical


# Content parts with the model's reasoning: of Mistral and of clients that speak to several providers.
_THINKING = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "reasoning.text", "reasoning.encrypted")


def _thought(part: dict[str, Any], left_out: Counter[str]) -> str:
    text = part.get("thinking") or part.get("text") or part.get("reasoning")
    if isinstance(text, list):
        return text_of(text)
    if not isinstance(text, str):
        left_out[part["type"]] += 1  # encrypted by another provider
        return ""
    return text


def _keep_reasoning(message: dict[str, Any], thoughts: list[str], left_out: Counter[str]) -> None:
    """Give an assistant message its reasoning, under the name that chat templates read, and a refusal as its text."""
    for name in ("thinking_blocks", "reasoning_details"):  # LiteLLM's name, OpenRouter's name
        blocks = message.pop(name, None)
        if not thoughts and isinstance(blocks, list):
            thoughts = [_thought(b, left_out) for b in blocks if isinstance(b, dict) and b.get("type") in _THINKING]
    if message.get("reasoning_content") is None:
        reasoning = message.get("reasoning")
        text = reasoning if isinstance(reasoning, str) else "".join(thoughts)
        if text:
            message["reasoning_content"] = text
    if message.get("audio") is not None:
        left_out["audio"] += 1
    if isinstance(message.get("refusal"), str):
        message["content"] = message.get("content") or message["refusal"]


def _as_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{path} must be a list", param=path)
    return value


def _part(part: Any, path: str, left_out: Counter[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise RequestError(f"{path}.{kind} must be a string", param=f"{path}.{kind}")
        return {"type": "text", "text": text}
    if kind == "image_url":
        image = part.get("image_url")
        if isinstance(image, dict) and isinstance(image.get("url"), str):
            return {"type": "image_url", "image_url": image}
        raise RequestError(f"{path}.image_url.url must be a string", param=f"{path}.image_url")
    if kind is None:
        raise RequestError(f"{path}.type is required", param=f"{path}.type")
    return unreadable(kind, left_out)


def _check_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path}.function.name must be a string", param=f"{path}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments if arguments is not None else {}).decode()
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def parse_tools(fields: Fields) -> tuple[list[dict[str, Any]], str, bool | None]:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat request, in canonical form."""
    tools: list[dict[str, Any]] = []
    for path, tool in fields.tools():
        kind = tool.get("type", "function")
        if kind == "custom":
            raise unsupported(f"{path}.type", "use a function with one string, or the Responses API")
        if kind != "function":
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{path}.function.name must be a string", param=f"{path}.function")
        tools.append(tool)
    return tools, tool_choice(fields, tools, "function", "name"), fields.take("parallel_tool_calls", bool)


def parse_parameters(params: Mapping[str, Any]) -> ModelRequest:
    """Read sampling parameters that stand without a conversation. A tool choice without tools gets one that it can choose.

    Raises: RequestError that names the field.
    """
    given, choice = {**params, **_NO_TEXT}, params.get("tool_choice")
    if given.get("tools") is None:
        chosen = choice.get("function") if isinstance(choice, dict) else None
        name = chosen.get("name") if isinstance(chosen, dict) else "any"
        given["tools"] = [{"type": "function", "function": {"name": str(name), "parameters": {"type": "object"}}}]
    asked = parse_request(given)
    if len(asked.tools) != len(given["tools"]):
        raise unsupported("tools", "a session's tools must be functions")
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise unsupported("tool_choice", "a session's tool choice must be a word or name a function")
    return asked


_NO_TEXT = {"messages": [{"role": "user", "content": ""}]}
_OVERLAID = """tools tool_choice parallel_tool_calls n logprobs top_logprobs response_format reasoning_effort template_kwargs
    sampling"""


def overlay(asked: ModelRequest, fields: Mapping[str, msgspec.Raw]) -> None:
    """Read all but the messages of a request again, from fields that a session's parameters have changed.

    Raises: RequestError that names the field.
    """
    given = {name: msgspec.json.decode(raw) for name, raw in fields.items() if name != "messages"}
    changed = parse_request({**given, **_NO_TEXT})
    changed.sampling.other |= changed.unknown
    for name in _OVERLAID.split():
        setattr(asked, name, getattr(changed, name))


def tool_choice(fields: Fields, tools: list[dict[str, Any]], *path: str) -> str:
    """The tool choice, a word or an object that names a tool at `path`, in canonical form. Raises: RequestError."""
    choice: Any = fields.either("tool_choice", str, dict) or "auto"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise RequestError(f"tool_choice must be auto, none or required, got {choice!r}", param="tool_choice")
        if choice == "required" and not tools:
            raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
        return choice
    if choice.get("type") == "allowed_tools":
        mode = choice.get("mode") or (choice.get("allowed_tools") or {}).get("mode")
        return "required" if mode == "required" and tools else "auto"
    if choice.get("type") not in ("function", "custom"):
        raise unsupported("tool_choice.type", "only functions can be asked for; leave it to the model (auto)")
    for name in path:
        choice = choice.get(name) if isinstance(choice, dict) else None
    return named_tool(choice, tools, ".".join(("tool_choice", *path)))


def named_tool(name: Any, tools: list[dict[str, Any]], path: str) -> str:
    if not any(tool["function"]["name"] == name for tool in tools):
        raise RequestError(f"{path}: there is no tool named {name!r}", param="tool_choice")
    return f"tool:{name}"


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported("response_format.type", "it must be text, json_object or json_schema")
    inner = value.get("json_schema")
    if kind == "json_schema" and not (isinstance(inner, dict) and isinstance(inner.get("schema"), dict)):
        where = "response_format.json_schema"
        raise RequestError(f"{where}.schema must be an object", param=where)
    return value


def usage_dict(usage: Usage | None) -> dict[str, Any]:
    usage = usage or Usage()
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    result: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if usage.cached_tokens is not None:
        result["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning_tokens is not None:
        result["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return result


def encode_reply(reply: Reply, request: ModelRequest) -> bytes:
    """The JSON body of a whole answer."""
    choices = []
    for choice in reply.choices:
        message = choice.to_message()
        message["refusal"] = choice.refusal
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "finish_reason": choice.finish_reason or "stop",
            "logprobs": None,
        }
        if request.logprobs and choice.logprob_entries is not None:
            shown["logprobs"] = {"content": choice.logprob_entries, "refusal": None}
        if choice.stop_sequence is not None:
            shown["stop_reason"] = choice.stop_sequence
        choices.append(shown)
    return msgspec.json.encode(
        {
            "id": reply.id,
            "object": "chat.completion",
            "created": reply.created or int(time.time()),
            "model": reply.model or request.model,
            "choices": choices,
            "usage": usage_dict(reply.usage),
        }
    )


class Encoder:
    """Deltas -> the bytes of a chat completion stream."""

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._head = {
            "id": reply_id,
            "object": "chat.completion.chunk",
            "created": created or int(time.time()),
            "model": model or request.model,
        }
        self._usage: Usage | None = None
        self.body: dict[str, Any] = {}  # not kept: `encode_reply` writes whole answers

    def ping(self) -> bytes:
        return b": more is coming\n\n"

    def finish(self) -> bytes:
        """The usage chunk, if asked for, and the end mark."""
        tail = b"data: [DONE]\n\n"
        if self._request.include_usage:
            body = {**self._head, "choices": [], "usage": usage_dict(self._usage)}
            return encode_event(msgspec.json.encode(body)) + tail
        return tail

    def error(self, error: RequestError) -> bytes:
        """An error after the stream began; clients raise on an event with an ``error`` member."""
        return encode_event(msgspec.json.encode(openai_error(error, self._request.dialect)))

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return encode_event(msgspec.json.encode({**self._head, "choices": choices}))

    def start(self) -> bytes:
        """The first chunk of each choice, which names the role."""
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return b"".join(self._chunk([{"index": index, **first}]) for index in range(self._request.n))

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        shown: dict[str, Any] = {}
        if delta.text:
            shown["content"] = delta.text
        if delta.reasoning:
            shown["reasoning_content"] = delta.reasoning
        if delta.refusal:
            shown["refusal"] = delta.refusal
        if delta.tool_calls:
            shown["tool_calls"] = [_tool_delta(call) for call in delta.tool_calls]
        entries = delta.logprob_entries if self._request.logprobs else None
        if not shown and delta.finish_reason is None and not entries:
            return b""
        choice: dict[str, Any] = {"index": delta.choice, "delta": shown, "finish_reason": delta.finish_reason}
        if entries:
            choice["logprobs"] = {"content": entries, "refusal": None}
        if delta.stop_sequence is not None:
            choice["stop_reason"] = delta.stop_sequence
        return self._chunk([choice])


def _tool_delta(call: ToolDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    shown: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        shown["id"] = call.id
        shown["type"] = "function"
    if call.name is not None:
        function["name"] = call.name
    return shown
