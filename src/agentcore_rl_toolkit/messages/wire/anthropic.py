"""Anthropic messages. Source: docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import KINDS, NO_THREADS, NOT_JSON, TOO_LONG, RequestError, field_at_fault, no_threads, unsupported
from .arguments import standard, value_of
from .canonical import CONTENT_FILTER, LENGTH, STOP, TOOL_CALLS, ModelRequest, ToolCall, Usage, own_id
from .fields import Members, read_members
from .history import (
    BlockHistory,
    Part,
    any_tool,
    call_part,
    function_tool,
    image_part,
    json_schema,
    named_tool,
    object_of,
    read_each,
    refuse_begun_answer,
    text_member,
    text_part,
    thought_part,
)
from .stream import BlockEncoder, encode_event

# Claude Code opens its system prompt with it; parts of it change from call to call and from agent to agent.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")

# Clients drop reasoning that carries no signature from the history they send back; this one is never checked.
SIGNATURE = "c2VsZi1ob3N0ZWQ="

STOP_REASONS = {STOP: "end_turn", LENGTH: "max_tokens", TOOL_CALLS: "tool_use", CONTENT_FILTER: "refusal"}
_NAMES = {"stop_sequences": "stop"}


class Thinking(msgspec.Struct, frozen=True):
    """The template's switch. A budget is accepted and ignored: an engine would write the end of the thinking itself."""

    type: str
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


class _Output(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class _Messages(Members, kw_only=True):
    messages: Annotated[list[Any], Meta(min_length=1)]
    system: str | list[Any] = ""
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: _Output = _Output()
    output_format: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None


def parse_request(body: bytes | dict[str, Any], *, counting: bool = False) -> ModelRequest:
    """Read a messages request. Raises: RequestError that names the field.

    With ``counting`` (``/v1/messages/count_tokens``) max_tokens is optional, and the last message may be the model's.
    """
    asked, request = read_members(body, _Messages, "anthropic", names=_NAMES)
    if request.sampling.max_tokens is None and not counting:
        raise RequestError("max_tokens is required", param="max_tokens")
    if asked.thread is not None:
        raise no_threads()
    history = _History()
    history.system(asked.system)
    read_each(asked.messages, "messages", history.add_message)
    request.messages = history.messages
    if not counting:
        refuse_begun_answer(request.messages, f"messages[{len(asked.messages) - 1}]")
    request.tools = [
        function_tool(tool, "input_schema")
        for tool in asked.tools
        if tool.get("type", "custom") in ("custom", None)  # the others are the provider's own
    ]
    choice = asked.tool_choice or {"type": "auto"}
    request.tool_choice = _tool_choice(choice, request.tools)
    if choice.get("disable_parallel_tool_use"):
        request.parallel_tool_calls = False
    shape = asked.output_config.format or asked.output_format
    if shape is not None:
        shape = {**shape, "name": "output", "strict": True}
        request.response_format = json_schema(shape, "output_config.format")
    request.reasoning_effort = asked.output_config.effort
    read_thinking(asked.thinking, request)
    request.left_out = history.left_out
    return request


def read_thinking(thinking: Thinking | None, request: ModelRequest) -> None:
    """Set the switch under the name in Qwen's and GLM's templates, and ``include_thinking``. Raises: RequestError."""
    request.include_thinking = False
    if thinking is None:
        return
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise unsupported("thinking.type", "it must be enabled, disabled or adaptive")
    # Also with `display: omitted`, for which the provider sends a sealed block: the agent sends the thinking back.
    request.include_thinking = thinking.type != "disabled"
    request.template_kwargs = {"enable_thinking": request.include_thinking, **request.template_kwargs}


def _tool_choice(choice: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    kind = choice.get("type")
    if kind == "any":
        return any_tool(tools)
    if kind == "tool":
        return named_tool(choice.get("name"), tools, "tool_choice.name")
    if kind not in ("auto", "none"):
        raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {kind!r}", param="tool_choice.type")
    return str(kind)


class _History(BlockHistory):
    def system(self, content: str | list[Any]) -> None:
        texts = [_BILLING.sub("", part["text"]) for part in self.parts(content, ("text",))]
        if kept := [text for text in texts if text]:
            self.messages.append({"role": "system", "content": "\n".join(kept)})

    def part(self, kind: str, value: Any) -> list[Part] | None:
        if kind == "text":
            if value.get("citations"):
                self.left_out["citations"] += 1
            return [text_part(text_member(value, "text"))]
        if kind == "thinking":
            return [thought_part(text_member(value, "thinking"))]
        if kind == "tool_use":
            return [call_part(text_member(value, "id"), value, "input")]
        if kind == "tool_result":
            call_id, failed = text_member(value, "tool_use_id"), value.get("is_error")
            return self.result(call_id, self.parts(value.get("content")), failure="is_error" if failed else None)
        if kind == "tool_reference":
            return [text_part(f"The tool {value.get('tool_name')} is available now.")]
        if kind not in ("image", "document"):
            return None
        source = object_of(value.get("source"), "source")
        form, data, media = source.get("type"), source.get("data"), source.get("media_type")
        if kind == "image":
            return [image_part({"url": f"data:{media};base64,{data}" if form == "base64" else source.get("url")})]
        heads = value.get("title"), value.get("context")
        return self.document(heads, data if form == "text" else None, source.get("content"), media or form)


# -- replies


def usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        # This provider counts cached tokens apart from the others.
        "input_tokens": (usage.prompt_tokens or 0) - usage.cached,
        "output_tokens": usage.completion_tokens or 0,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
    }


def tool_input(arguments: str) -> Any:
    """Decode tool arguments into the object that this dialect wants.

    Numbers that JSON does not have become strings (`arguments`). A value that is not an object goes under "_raw".
    """
    try:
        decoded = value_of(arguments)
    except NOT_JSON:
        return {"_raw": arguments}
    return decoded if isinstance(decoded, dict) else {"_raw": decoded}


# The provider's types of errors, by HTTP status. Source: docs.anthropic.com/en/api/errors
_ERROR_TYPES = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error"},
}


def error_dict(error: RequestError) -> dict[str, Any]:
    """Return the body of an error. The message contains the field at fault, as the provider's does."""
    message, field = error.message, field_at_fault(error, "messages")
    if error.kind == "context_overflow":
        if not any(words in message for words in TOO_LONG):
            message = f"{TOO_LONG[0]}: {message}"
    elif field is not None and field not in message:
        message = f"{field}: {message}"
    shown: dict[str, Any] = {
        "type": _ERROR_TYPES.get(KINDS[error.kind][0], "invalid_request_error"),
        "message": message,
    }
    if error.code == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": shown}


def stop_reason(encoder: BlockEncoder, reasons: dict[str, str]) -> str:
    """Return the reason for which a reply ended. It is a stop string only if the agent asked for that string."""
    if encoder.finish_reason == STOP and encoder.stop_sequence in encoder.request.sampling.stop:
        return "stop_sequence"
    return reasons.get(encoder.finish_reason or STOP, "end_turn")


# The kinds of blocks: type, the member with the text, the type of a delta.
_BLOCKS = {"reasoning": ("thinking", "thinking", "thinking_delta"), "text": ("text", "text", "text_delta")}


class Encoder(BlockEncoder):
    """Deltas -> the bytes of a message stream, and at the end the message itself.

    ``input_tokens`` is known at the start if the prompt was counted here, otherwise when the engine reports it at the end.
    Source: docs.anthropic.com/en/api/messages-streaming
    """

    def __init__(self, request: ModelRequest, **about: Any) -> None:
        super().__init__(request, **about)
        self.body = {
            "id": own_id("msg_", self.reply_id),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_dict(self.usage),
        }

    def event(self, name: str, **body: Any) -> bytes:
        return encode_event({"type": name, **body}, name)

    def start(self) -> bytes:
        return self.event("message_start", message=self.body)

    def ping(self) -> bytes:
        return self.event("ping")

    def opened(self, kind: str) -> bytes:
        block, member, _ = _BLOCKS[kind]
        return self._open({"type": block, member: "", **({"signature": ""} if kind == "reasoning" else {})})

    def piece(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        _, member, delta = _BLOCKS[kind]
        return self._delta(delta, member, text)

    def closed(self, kind: str, text: str, *, last: bool) -> bytes:
        self.content[-1][_BLOCKS[kind][1]] = text
        if kind != "reasoning":
            return self._stop()
        self.content[-1]["signature"] = SIGNATURE
        return self._delta("signature_delta", "signature", SIGNATURE) + self._stop()

    def call(self, call: ToolCall, place: int, *, last: bool) -> bytes:
        call_id = call.id or own_id("toolu_", self.body["id"], place)
        out = self._open({"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
        if call.arguments:
            out += self._delta("input_json_delta", "partial_json", standard(call.arguments))
        self.content[-1]["input"] = tool_input(call.arguments)
        return out + self._stop()

    def ended(self) -> bytes:
        # SGLang also reports stop strings that its own templates end with.
        stop = self.stop_sequence if self.stop_sequence in self.request.sampling.stop else None
        end = {"stop_reason": stop_reason(self, STOP_REASONS), "stop_sequence": stop}
        usage = usage_dict(self.usage)
        self.body |= {"content": self.content, **end, "usage": usage}
        return self.event("message_delta", delta=end, usage=usage) + self.event("message_stop")

    def error(self, error: RequestError) -> bytes:
        return encode_event(error_dict(error), "error")

    def _open(self, block: dict[str, Any]) -> bytes:
        self.content.append(block)
        return self.event("content_block_start", index=len(self.content) - 1, content_block=block)

    def _delta(self, kind: str, member: str, piece: str) -> bytes:
        return self.event("content_block_delta", index=len(self.content) - 1, delta={"type": kind, member: piece})

    def _stop(self) -> bytes:
        return self.event("content_block_stop", index=len(self.content) - 1)
