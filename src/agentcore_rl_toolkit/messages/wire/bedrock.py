"""Amazon Bedrock's Converse API, and its InvokeModel API with the bodies of Anthropic's messages and OpenAI's chat.

Source: botocore's model of `bedrock-runtime`. The model, and the choice between a whole and a streamed reply, are parts of
the path (`route_of`), as in `gemini`. The path may have the key of the session, too.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..._event_stream import event, exception
from ..errors import NOT_JSON, RequestError, unsupported
from . import anthropic, chat
from .arguments import standard
from .canonical import CONTENT_FILTER, ModelRequest, ToolCall, Usage, own_id
from .fields import Members, convert, read_members, read_object, read_route
from .history import (
    BlockHistory,
    Part,
    any_tool,
    call_part,
    function_tool,
    joined,
    json_schema,
    named_tool,
    object_of,
    read_each,
    refuse_begun_answer,
    text_member,
    text_part,
    thought_part,
)
from .stream import BlockEncoder, StreamEncoder

_ROUTE = re.compile(rb"bedrock/(?:[^/]+/)?model/(.+)/([a-z-]+)/?")
CONVERSE, INVOKE, COUNT = (b"bedrock/model/{model}/" + name for name in (b"converse", b"invoke", b"count-tokens"))
_OPERATIONS = {
    **{b"converse": CONVERSE, b"converse-stream": CONVERSE, b"count-tokens": COUNT},
    **{b"invoke": INVOKE, b"invoke-with-response-stream": INVOKE},
}

_NAMES = {"maxTokens": "max_tokens", "topP": "top_p", "stopSequences": "stop"}
_NOT_APPLIED = ("guardrailConfig", "performanceConfig")
_OBJECTS = ("toolUse", "toolResult", "reasoningContent", "citationsContent", "guardContent", "document")
_READABLE = ("csv", "html", "md", "txt")  # formats of documents that are text

PING = event({}, "ping")  # clients pass over events that they do not know


class _Output(msgspec.Struct, frozen=True, rename="camel"):
    text_format: dict[str, Any] | None = None
    effort: str | None = None


class _ToolConfig(msgspec.Struct, frozen=True, rename="camel"):
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}


class _Converse(msgspec.Struct, frozen=True, rename="camel"):
    messages: Annotated[list[Any], Meta(min_length=1)]
    system: list[Any] = []
    inference_config: dict[str, Any] = {}
    tool_config: _ToolConfig = _ToolConfig()
    output_config: _Output = _Output()
    additional_model_request_fields: dict[str, Any] = {}
    model: str = ""
    stream: bool = False


class _ModelFields(Members, kw_only=True):
    """Return a model's parameters that Converse does not have, under the names of the other dialects."""

    thinking: anthropic.Thinking | None = None
    reasoning_effort: str | None = None


route_of = functools.partial(read_route, pattern=_ROUTE, operations=_OPERATIONS)


def parse_request(body: bytes | dict[str, Any], *, counting: bool = False) -> ModelRequest:
    """Read a request of Converse; ``counting`` for a count of tokens, where the model may have the last word.

    Raises: RequestError that names the field.
    """
    given = read_object(body)
    asked = convert(given, _Converse)
    fields = {
        **asked.additional_model_request_fields,
        **asked.inference_config,
        **{"model": asked.model, "stream": asked.stream},
    }
    more, request = read_members(fields, _ModelFields, "bedrock", names=_NAMES)
    if more.tools:
        raise unsupported("additionalModelRequestFields.tools", "declare functions in toolConfig.tools")
    request.unknown |= {name: value for name, value in given.items() if name not in _Converse.__struct_encode_fields__}
    history = _History()
    for name in _NOT_APPLIED:
        if request.unknown.pop(name, None) is not None:
            history.left_out[name] += 1
    if lead := history.parts(asked.system):
        history.messages.append({"role": "system", "content": joined(lead, "\n")})
    read_each(asked.messages, "messages", history.add_message)
    request.messages = history.messages
    if not counting:
        refuse_begun_answer(request.messages, f"messages[{len(asked.messages) - 1}]")
    specs = [tool["toolSpec"] for tool in asked.tool_config.tools if tool.get("toolSpec") is not None]
    request.tools = read_each(specs, "toolConfig.tools", _function)  # cache points, and tools of the provider, are none
    request.tool_choice = _tool_choice(asked.tool_config.tool_choice, request.tools)
    request.response_format = _response_format(asked.output_config.text_format)
    request.reasoning_effort = asked.output_config.effort or more.reasoning_effort
    anthropic.read_thinking(more.thinking, request)
    request.left_out = history.left_out
    request.received_s = time.time()
    return request


def parse_invoke(body: bytes | dict[str, Any], *, counting: bool = False) -> ModelRequest:
    """Read a request of InvokeModel: Anthropic's with ``anthropic_version``, otherwise a chat completion of OpenAI's.

    Raises: RequestError that names the field.
    """
    given = read_object(body)
    if "anthropic_version" in given:
        return anthropic.parse_request(given, counting=counting)
    if "messages" not in given:
        why = "InvokeModel takes OpenAI's chat, and Anthropic's messages with 'anthropic_version'; use Converse"
        raise RequestError(f"{why} for all other models", param="messages")
    return chat.parse_request(given)


def parse_count(body: bytes | dict[str, Any]) -> ModelRequest:
    asked = object_of(read_object(body).get("input"), "input")
    if asked.get("invokeModel") is None:
        return parse_request(object_of(asked.get("converse"), "input.converse"), counting=True)
    return parse_invoke(_decoded(object_of(asked["invokeModel"], "input.invokeModel"), "body"), counting=True)


def _decoded(value: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(text_member(value, name), validate=True)
    except (binascii.Error, ValueError) as e:
        raise RequestError(f"{name} is not valid base64: {e}", param=name) from e


def _function(spec: dict[str, Any]) -> dict[str, Any]:
    schema = object_of(spec.get("inputSchema") or {}, "inputSchema")
    return function_tool({**spec, "schema": schema.get("json")}, "schema")


def _tool_choice(choice: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    if choice.get("any") is not None:
        return any_tool(tools)
    if choice.get("tool") is not None:
        return named_tool(object_of(choice["tool"], "toolChoice.tool").get("name"), tools, "toolChoice.tool.name")
    return "auto"


def _response_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    given = object_of(object_of(asked.get("structure"), "textFormat.structure").get("jsonSchema"), "jsonSchema")
    try:
        schema = msgspec.json.decode(text_member(given, "schema"))
    except NOT_JSON as e:
        raise RequestError(f"jsonSchema.schema is not valid JSON: {e}", param="outputConfig.textFormat") from e
    shape = {"name": "output", **given, "type": "json_schema", "schema": schema, "strict": True}
    return json_schema(shape, "outputConfig.textFormat")


# -- the history


class _History(BlockHistory):
    def kind_of(self, block: dict[str, Any]) -> tuple[str | None, Any]:
        members = [(kind, value) for kind, value in block.items() if value is not None or len(block) == 1]
        if len(members) != 1:
            names = ", ".join(kind for kind, _ in members) or "none"
            raise RequestError(f"a block must have one member, and has {names}: send a block for each")
        return members[0]

    def part(self, kind: str, value: Any) -> list[Part] | None:
        if kind == "text":
            return [text_part(text_member({kind: value}, kind))]
        if kind == "json":
            return [text_part(json.dumps(value, ensure_ascii=False))]
        if kind == "cachePoint":
            return []
        if kind not in _OBJECTS:
            return None
        found = object_of(value, kind)
        if kind == "toolUse":
            return [call_part(text_member(found, "toolUseId"), found, "input")]
        if kind == "toolResult":
            call_id, failure = text_member(found, "toolUseId"), "status" if found.get("status") == "error" else None
            return self.result(call_id, self.result_parts(found.get("content")), failure=failure)
        if kind == "reasoningContent":
            if found.get("reasoningText") is None:  # another provider's reasoning
                self.left_out["redactedContent"] += 1
                return []
            return [thought_part(text_member(object_of(found["reasoningText"], "reasoningText"), "text"))]
        if kind == "citationsContent":
            self.left_out["citations"] += 1
            return self.parts(found.get("content"))
        if kind == "guardContent":
            text = found.get("text")
            return None if text is None else [text_part(text_member(object_of(text, "guardContent.text"), "text"))]
        source, form = object_of(found.get("source"), "document.source"), found.get("format")
        text = source.get("text")
        if text is None and form in _READABLE and "bytes" in source:
            text = _decoded(source, "bytes").decode("utf-8", "replace")
        return self.document((found.get("name"), found.get("context")), text, source.get("content"), form)


# -- replies

_STOP_REASONS = {**anthropic.STOP_REASONS, CONTENT_FILTER: "content_filtered"}

# The API's errors and their HTTP status, by kind. All others are a ValidationException.
_DENIED, _UNAVAILABLE = ("AccessDeniedException", 403), ("ServiceUnavailableException", 503)
_ERRORS = {
    **dict.fromkeys(("authentication", "permission", "turn_limit"), _DENIED),
    **dict.fromkeys(("not_found", "model_not_found"), ("ResourceNotFoundException", 404)),
    **dict.fromkeys(("upstream", "overloaded"), _UNAVAILABLE),
    "rate_limit": ("ThrottlingException", 429),
    "timeout": ("ModelTimeoutException", 408),
    "internal": ("InternalServerException", 500),
}


def _error(error: RequestError) -> tuple[str, int]:
    return _ERRORS.get(error.kind, ("ValidationException", 400))


def error_head(error: RequestError) -> tuple[int, dict[str, str]]:
    name, status = _error(error)
    return status, {"x-amzn-errortype": name}


def error_dict(error: RequestError) -> dict[str, Any]:
    """Return the body of an error. It has Anthropic's words, by which agents recognize a prompt that is too long."""
    return {"message": anthropic.error_dict(error)["error"]["message"]}


# A stream has fewer errors than a reply. Clients raise others without their name and their words.
_IN_STREAMS = {
    **dict.fromkeys(("AccessDeniedException", "ResourceNotFoundException"), "ValidationException"),
    "ModelTimeoutException": "ModelStreamErrorException",
}


def error_event(error: RequestError) -> bytes:
    name = _error(error)[0]
    name = _IN_STREAMS.get(name, name)
    return exception(name[0].lower() + name[1:], error_dict(error)["message"])


def usage_dict(usage: Usage) -> dict[str, Any]:
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "inputTokens": prompt - usage.cached,  # this provider counts cached tokens apart from the others
        "outputTokens": completion,
        "totalTokens": prompt + completion,
        "cacheReadInputTokens": usage.cached,
        "cacheWriteInputTokens": 0,
    }


class _Events:
    """The events of the stream itself, in all APIs that it carries."""

    def ping(self) -> bytes:
        return PING

    def error(self, error: RequestError) -> bytes:
        return error_event(error)


class Encoder(_Events, BlockEncoder):
    """Deltas -> the events of ConverseStream, and at the end the reply of Converse. Blocks of text have no start event."""

    def start(self) -> bytes:
        return event({"role": "assistant"}, "messageStart")

    def opened(self, kind: str) -> bytes:
        self.content.append({})
        return b""

    def piece(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        return self._delta({"reasoningContent": {"text": text}} if kind == "reasoning" else {"text": text})

    def closed(self, kind: str, text: str, *, last: bool) -> bytes:
        if kind != "reasoning":
            self.content[-1] = {"text": text}
            return self._stop()
        signature = anthropic.SIGNATURE
        self.content[-1] = {"reasoningContent": {"reasoningText": {"text": text, "signature": signature}}}
        return self._delta({"reasoningContent": {"signature": signature}}) + self._stop()

    def call(self, call: ToolCall, place: int, *, last: bool) -> bytes:
        named = {"toolUseId": call.id or own_id("tooluse_", self.reply_id, place), "name": call.name}
        self.content.append({"toolUse": {**named, "input": anthropic.tool_input(call.arguments)}})
        out = event({"start": {"toolUse": named}, **self._at()}, "contentBlockStart")
        if call.arguments:
            out += self._delta({"toolUse": {"input": standard(call.arguments)}})
        return out + self._stop()

    def ended(self) -> bytes:
        reason = anthropic.stop_reason(self, _STOP_REASONS)
        latency_ms = max(0, round((time.time() - self.request.received_s) * 1000)) if self.request.received_s else 0
        counted = {"usage": usage_dict(self.usage), "metrics": {"latencyMs": latency_ms}}
        message = {"role": "assistant", "content": self.content}
        self.body = {"output": {"message": message}, "stopReason": reason, **counted}
        return event({"stopReason": reason}, "messageStop") + event(counted, "metadata")

    def _at(self) -> dict[str, int]:
        return {"contentBlockIndex": len(self.content) - 1}

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"delta": delta, **self._at()}, "contentBlockDelta")

    def _stop(self) -> bytes:
        return event(self._at(), "contentBlockStop")


def _chunk(inner: dict[str, Any]) -> bytes:
    return event({"bytes": base64.b64encode(msgspec.json.encode(inner)).decode()})


class _Messages(_Events, anthropic.Encoder):
    """Deltas -> Anthropic's events in those of the stream, and at the end the message itself."""

    def event(self, name: str, **body: Any) -> bytes:
        return _chunk({"type": name, **body})


class _Chat(_Events, chat.Encoder):
    """Deltas -> OpenAI's chunks in the events of the stream. The last one has the usage."""

    def event(self, data: dict[str, Any]) -> bytes:
        return _chunk(data)

    def finish(self) -> bytes:
        return self.usage_chunk()


def invoke_encoder(request: ModelRequest, **about: Any) -> StreamEncoder:
    """Return the encoder of InvokeModel's reply, which has the API of its request's body."""
    return _Chat(request, **about) if request.dialect == "chat" else _Messages(request, **about)
