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
from .fields import MAX_TOOLS, Members, convert, read_members, read_object, read_route, with_path
from .history import (
    BlockHistory,
    Message,
    Part,
    answer_message,
    any_tool,
    function_tool,
    joined,
    json_schema,
    named_tool,
    object_at,
    object_call,
    text_member,
    text_part,
)
from .stream import BlockEncoder, StreamEncoder

_ROUTE = re.compile(rb"bedrock/(?:[^/]+/)?model/(.+)/([a-z-]+)/?")
CONVERSE, INVOKE, COUNT = (b"bedrock/model/{model}/" + name for name in (b"converse", b"invoke", b"count-tokens"))
_OPERATIONS = {
    **{b"converse": CONVERSE, b"converse-stream": CONVERSE, b"count-tokens": COUNT},
    **{b"invoke": INVOKE, b"invoke-with-response-stream": INVOKE},
}

_NAMES = {"maxTokens": "max_tokens", "topP": "top_p", "stopSequences": "stop"}
_FIELD_NAMES = {
    "tool_choice": "toolConfig.toolChoice",
    "response_format": "outputConfig.textFormat",
    "stop": "inferenceConfig.stopSequences",
}
_NOT_APPLIED = ("guardrailConfig", "performanceConfig")
_READABLE = ("csv", "html", "md", "txt")  # formats of documents that are text

PING = event({}, "ping")  # clients pass over events that they do not know


class _Output(msgspec.Struct, frozen=True, rename="camel"):
    text_format: dict[str, Any] | None = None
    effort: str | None = None


class _ToolConfig(msgspec.Struct, frozen=True, rename="camel"):
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] = []
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
with_members = with_path


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
    more, request = read_members(fields, _ModelFields, "bedrock", names=_NAMES, field_names=_FIELD_NAMES)
    if more.tools:
        raise unsupported("additionalModelRequestFields.tools", "declare functions in toolConfig.tools")
    request.unknown |= {name: value for name, value in given.items() if name not in _Converse.__struct_encode_fields__}
    history = _History()
    for name in _NOT_APPLIED:
        if request.unknown.pop(name, None) is not None:
            history.left_out[name] += 1
    lead = history.parts(asked.system, "system")
    request.messages = [{"role": "system", "content": joined(lead, "\n")}] if lead else []
    request.messages += history.all(asked.messages, whole=not counting)
    tools = asked.tool_config.tools
    request.tools = [f for i, tool in enumerate(tools) for f in _functions(tool, f"toolConfig.tools[{i}]")]
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
    """Read a request of CountTokens. Raises: RequestError that names the field."""
    asked = object_at(read_object(body).get("input"), "input")
    if asked.get("invokeModel") is None:
        return parse_request(object_at(asked.get("converse"), "input.converse"), counting=True)
    inner = text_member(object_at(asked["invokeModel"], "input.invokeModel"), "body", "input.invokeModel")
    return parse_invoke(_decoded(inner, "input.invokeModel.body"), counting=True)


def _decoded(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise RequestError(f"{path} is not valid base64: {e}", param=path) from e


def _functions(tool: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the function of a tool. Cache points, and tools of the provider, have none."""
    if tool.get("toolSpec") is None:
        return []
    path = f"{path}.toolSpec"
    spec = object_at(tool["toolSpec"], path)
    schema = object_at(spec.get("inputSchema") or {}, f"{path}.inputSchema")
    return [function_tool(text_member(spec, "name", path), {**spec, "schema": schema.get("json")}, "schema")]


def _tool_choice(choice: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    if choice.get("any") is not None:
        return any_tool(tools)
    if choice.get("tool") is not None:
        path = "toolConfig.toolChoice.tool"
        return named_tool(object_at(choice["tool"], path).get("name"), tools, f"{path}.name")
    return "auto"


def _response_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    path = "outputConfig.textFormat.structure"
    structure, path = object_at(asked.get("structure"), path), f"{path}.jsonSchema"
    given = object_at(structure.get("jsonSchema"), path)
    text, path = text_member(given, "schema", path), f"{path}.schema"
    try:
        schema = msgspec.json.decode(text)
    except NOT_JSON as e:
        raise RequestError(f"{path} is not valid JSON: {e}", param=path) from e
    return json_schema({"name": "output", **given, "type": "json_schema", "schema": schema, "strict": True}, path)


# -- the history


def _block(block: Any, path: str) -> tuple[str, Any]:
    """Return the kind and the value of a block, which has one member. Raises: RequestError."""
    given = object_at(block, path)
    members = [(kind, value) for kind, value in given.items() if value is not None or len(given) == 1]
    if not members:
        raise RequestError(f"{path} must have a member with its content", param=path)
    if len(members) > 1:
        names = ", ".join(kind for kind, _ in members)
        raise RequestError(f"{path} must have one member, and has {names}: send a block for each", param=path)
    return members[0]


class _History(BlockHistory):
    def result(self, block: Any, path: str) -> Message | None:
        kind, result = _block(block, path)
        if kind != "toolResult":
            return None
        path = f"{path}.toolResult"
        call_id = text_member(object_at(result, path), "toolUseId", path)
        status = result.get("status") or "success"
        if status not in ("success", "error"):
            raise RequestError(f"{path}.status must be success or error", param=f"{path}.status")
        parts = self.result_parts(result.get("content"), f"{path}.content")
        return self.tool_result(call_id, parts, failure="status" if status == "error" else None)

    def read_part(self, part: Any, path: str) -> list[Part]:
        kind, value = _block(part, path)
        return super().read_part({"type": kind, kind: value}, path)

    def part(self, kind: str, part: Part, path: str) -> list[Part] | None:
        if kind == "text":
            return [text_part(text_member(part, "text", path))]
        if kind == "json":
            return [text_part(json.dumps(part["json"], ensure_ascii=False))]
        if kind == "cachePoint":
            return []
        path = f"{path}.{kind}"
        if kind == "document":
            found = object_at(part[kind], path)
            source, path = object_at(found.get("source"), f"{path}.source"), f"{path}.source"
            text, form = source.get("text"), found.get("format")
            if text is None and form in _READABLE and isinstance(source.get("bytes"), str):
                text = _decoded(source["bytes"], f"{path}.bytes").decode("utf-8", "replace")
            heads = found.get("name"), found.get("context")
            return self.document(heads, text, source.get("content"), f"{path}.content", form)
        if kind == "guardContent":
            text = object_at(part[kind], path).get("text")
            return None if text is None else [text_part(text_member(object_at(text, path), "text", path))]
        if kind == "searchResult":
            found = object_at(part[kind], path)
            heads = found.get("title"), found.get("source")
            return self.document(heads, None, found.get("content") or [], f"{path}.content", kind)
        if kind == "citationsContent":
            self.left_out["citations"] += 1
            return self.parts(object_at(part[kind], path).get("content"), f"{path}.content")
        return None

    def answer(self, blocks: list[Any], path: str) -> Message:
        parts: list[Part] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for i, block in enumerate(blocks):
            kind, value = _block(block, f"{path}[{i}]")
            where = f"{path}[{i}].{kind}"
            if kind == "reasoningContent":
                thought = object_at(value, where).get("reasoningText")
                if thought is None:
                    self.left_out["redactedContent"] += 1  # another provider's reasoning
                else:
                    thoughts.append(text_member(object_at(thought, where), "text", where))
            elif kind == "toolUse":
                call = object_at(value, where)
                calls.append(object_call(text_member(call, "toolUseId", where), call, "input", where))
            elif kind in ("text", "citationsContent", "cachePoint"):
                parts += self.read_part(block, f"{path}[{i}]")
            else:
                self.left_out[kind] += 1
        return answer_message([part.get("text", "") for part in parts], thoughts, calls)


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
    """Return the status and the header of an error."""
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
    """Encode an error after the stream began."""
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
    """Wrap another API's event in one of InvokeModelWithResponseStream."""
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
