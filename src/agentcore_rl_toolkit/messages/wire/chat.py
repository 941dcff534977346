"""OpenAI chat completions. Source: platform.openai.com/docs/api-reference/chat; token fields as in vLLM's server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import RequestError, openai_error, unsupported
from .canonical import Choice, Count, Delta, ModelRequest, Reply, ToolDelta, Usage
from .fields import Members, Refusal, read_members
from .history import (
    CONTENT,
    History,
    Message,
    Part,
    image_part,
    joined,
    json_schema,
    list_of,
    object_of,
    read_each,
    text_member,
    text_of,
    text_part,
    thought_part,
    tool_call,
    tool_choice,
)
from .stream import encode_event

MAX_N = 128  # OpenAI's own bound
_BEYOND = Refusal("it changes the engine beyond this call; set it when you start the engine")
_ENGINES_OWN = """bootstrap_host bootstrap_port bootstrap_room custom_logit_processor data_parallel_rank disagg_prefill_dp_rank
    ec_transfer_params kv_transfer_params lora_path request_id rid routed_dp_rank session_params"""
_GUIDED = "guided_choice guided_grammar guided_json guided_regex"  # vLLM's before 0.11
REFUSED = {
    "echo": Refusal("it would repeat the prompt inside the answer; leave it out", (False,)),
    "best_of": Refusal("every sample is returned; use n", (1,)),
    "use_beam_search": Refusal("beams are not samples of the policy and cannot be trained; use n", (False,)),
    "prompt_embeds": Refusal("a prompt without token ids cannot be recorded; send text"),
    "prompt_logprobs": Refusal("logprobs are given for sampled tokens only; leave it out", (False,)),
    **dict.fromkeys(_ENGINES_OWN.split(), _BEYOND),
    **dict.fromkeys(_GUIDED.split(), Refusal("vLLM has no such field any more; use structured_outputs")),
    "functions": Refusal("use tools instead"),
    "function_call": Refusal("use tool_choice instead", ("auto", "none")),
    "continue_final_message": Refusal("an answer always starts a new message; end with the user's", (False,)),
    "add_generation_prompt": Refusal("an answer always starts a new message; leave it out", (True,)),
    "chat_template": Refusal("the template of the model is used; give another to the gateway (--template)"),
}


class _Chat(Members, kw_only=True):
    messages: Annotated[list[Any], Meta(min_length=1)]
    tool_choice: str | dict[str, Any] = "auto"
    max_completion_tokens: Count | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def parse_request(body: bytes | dict[str, Any]) -> ModelRequest:
    """Read a chat completion request. Raises: RequestError that names the field."""
    asked, request = read_members(body, _Chat, "chat", refused=REFUSED)
    limits = [limit for limit in (asked.max_completion_tokens, request.sampling.max_tokens) if limit is not None]
    request.sampling.max_tokens = min(limits, default=None)
    if asked.top_logprobs and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    history = _History()
    request.tools = [tool for tool in read_each(asked.tools, "tools", _function_tool) if tool is not None]
    request.tool_choice = tool_choice(asked.tool_choice, request.tools, "function", "name")
    request.messages = read_each(asked.messages, "messages", history.message)
    request.response_format = _response_format(asked.response_format)
    request.include_usage = bool((asked.stream_options or {}).get("include_usage"))
    request.n, request.logprobs, request.top_logprobs = asked.n, asked.logprobs, asked.top_logprobs
    request.reasoning_effort = asked.reasoning_effort
    request.left_out = history.left_out
    return request


def _function_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return the tool, or None for a hosted one, which the model does not get. Raises: RequestError."""
    kind = tool.get("type", "function")
    if kind == "custom":
        raise unsupported("type", "use a function with one string, or the Responses API")
    if kind != "function":
        return None
    text_member(object_of(tool.get("function"), "function"), "name")
    return tool


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") in ("text", "json_object"):
        return value
    if value.get("type") != "json_schema":
        raise unsupported("response_format.type", "it must be text, json_object or json_schema")
    inner = value.get("json_schema")
    json_schema({"type": "json_schema", **(inner if isinstance(inner, dict) else {})}, "response_format.json_schema")
    return value


# Content parts with the model's reasoning: of Mistral and of clients that speak to several providers.
_THINKING = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "reasoning.text", "reasoning.encrypted")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class _History(History):
    def message(self, message: dict[str, Any]) -> Message:
        """Return a message in canonical shape. Unknown members stay: the chat template may read them."""
        canonical = dict(message)
        role, content = canonical.get("role"), canonical.get("content")
        if role not in _ROLES:
            raise RequestError(f"role must be one of {', '.join(_ROLES)}, got {role!r}")
        if canonical.get("function_call") is not None:
            raise unsupported("function_call", "send calls as tool_calls")
        parts: list[Part] = []
        if role == "tool":
            canonical["content"] = joined(self.result_parts(content))
        elif content is not None and not isinstance(content, str):
            parts = self.parts(content, (*CONTENT, "thought") if role == "assistant" else CONTENT)
            canonical["content"] = joined([part for part in parts if part["type"] != "thought"])
        if canonical.get("tool_calls"):
            canonical["tool_calls"] = read_each(list_of(canonical["tool_calls"], "tool_calls"), "tool_calls", _call)
        if role == "assistant":
            self._keep_reasoning(canonical, [part["text"] for part in parts if part["type"] == "thought"])
        return canonical

    def part(self, kind: str, value: Any) -> list[Part] | None:
        if kind in ("text", "refusal"):
            return [text_part(text_member(value, kind))]
        if kind == "image_url":
            return [image_part(value.get("image_url"))]
        return [thought_part(self._thought(value))] if kind in _THINKING else None

    def _keep_reasoning(self, message: Message, thoughts: list[str]) -> None:
        """Give an assistant message its reasoning, under the name that chat templates read, and a refusal as its text."""
        for name in ("thinking_blocks", "reasoning_details"):  # LiteLLM's name, OpenRouter's name
            blocks = message.pop(name, None)
            if not thoughts and isinstance(blocks, list):
                blocks = [block for block in blocks if isinstance(block, dict) and block.get("type") in _THINKING]
                thoughts = [self._thought(block) for block in blocks]
        if message.get("reasoning_content") is None:
            reasoning = message.get("reasoning")
            text = reasoning if isinstance(reasoning, str) else "".join(thoughts)
            if text:
                message["reasoning_content"] = text
        if message.get("audio") is not None:
            self.left_out["audio"] += 1
        if isinstance(message.get("refusal"), str):
            message["content"] = message.get("content") or message["refusal"]

    def _thought(self, part: Part) -> str:
        text = part.get("thinking") or part.get("text") or part.get("reasoning")
        if not isinstance(text, str | list):
            self.left_out[part["type"]] += 1  # encrypted by another provider
        return text_of(text)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = object_of(call.get("function"), "function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments if arguments is not None else {}).decode()
    return tool_call(str(call.get("id") or ""), text_member(function, "name"), arguments)


# -- the parameters of a session

_NO_TEXT = {"messages": [{"role": "user", "content": ""}]}
_OVERLAID = """tools tool_choice parallel_tool_calls n logprobs top_logprobs response_format reasoning_effort template_kwargs
    sampling"""


def parse_parameters(params: Mapping[str, Any]) -> ModelRequest:
    """Read sampling parameters without a conversation. A tool choice without tools gets a tool that it can choose.

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


def overlay(asked: ModelRequest, fields: Mapping[str, Any]) -> None:
    """Read all but the messages of a request again, from fields that a session's parameters have changed.

    Raises: RequestError that names the field.
    """
    changed = parse_request({**fields, **_NO_TEXT})
    changed.sampling.other |= changed.unknown
    for name in _OVERLAID.split():
        setattr(asked, name, getattr(changed, name))


# -- replies


def _head(kind: str, request: ModelRequest, reply_id: str, model: str, created: int) -> dict[str, Any]:
    return {"id": reply_id, "object": kind, "created": created or int(time.time()), "model": model or request.model}


def whole_reply(reply: Reply, request: ModelRequest) -> dict[str, Any]:
    return {
        **_head("chat.completion", request, reply.id, reply.model, reply.created),
        "choices": [_choice(choice, request) for choice in reply.choices],
        "usage": (reply.usage or Usage()).to_dict(),
    }


def _choice(choice: Choice, request: ModelRequest) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "index": choice.index,
        "message": {**choice.to_message(), "refusal": None},
        "finish_reason": choice.finish_reason or "stop",
        "logprobs": None,
    }
    if request.logprobs and choice.logprob_entries is not None:
        shown["logprobs"] = {"content": choice.logprob_entries, "refusal": None}
    if choice.stop_sequence is not None:
        shown["stop_reason"] = choice.stop_sequence
    return shown


class Encoder:
    """Deltas -> the bytes of a chat completion stream."""

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._head = _head("chat.completion.chunk", request, reply_id, model, created)
        self._usage = Usage()

    def start(self) -> bytes:
        """Encode the first chunk of each choice, which names the role."""
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return b"".join(self._chunk([{"index": index, **first}]) for index in range(self._request.n))

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self._usage = delta.usage
        texts = {"content": delta.text, "reasoning_content": delta.reasoning}
        shown: dict[str, Any] = {name: text for name, text in texts.items() if text}
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

    def ping(self) -> bytes:
        return b": more is coming\n\n"

    def finish(self) -> bytes:
        """Encode the usage chunk, if the agent asked for it, and the end mark."""
        usage = self.usage_chunk() if self._request.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def usage_chunk(self) -> bytes:
        return self._chunk([], usage=self._usage.to_dict())

    def error(self, error: RequestError) -> bytes:
        """Encode an error after the stream began. Clients raise on an event with an ``error`` member."""
        return encode_event(openai_error(error))

    def event(self, data: dict[str, Any]) -> bytes:
        return encode_event(data)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return self.event({**self._head, "choices": choices, **more})


def _tool_delta(call: ToolDelta) -> dict[str, Any]:
    name = {} if call.name is None else {"name": call.name}
    shown = {"index": call.index, "function": {**name, "arguments": call.arguments}}
    return shown if call.id is None else {**shown, "id": call.id, "type": "function"}
