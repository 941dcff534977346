"""Gemini's generateContent. Source: ai.google.dev/api/generate-content.

The model and the choice between a whole and a streamed reply are parts of the path (`route_of`). Members may be written in
snake case, as in protobuf's JSON.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import KINDS, RequestError, field_at_fault, unsupported
from .anthropic import tool_input
from .canonical import CONTENT_FILTER, LENGTH, Delta, ModelRequest, ToolCall, Usage, own_id
from .fields import Members, Refusal, convert, read_members, read_object, read_route
from .history import (
    BlockHistory,
    Part,
    any_tool,
    call_part,
    function_tool,
    image_part,
    json_schema,
    list_of,
    named_tool,
    object_of,
    read_each,
    refuse_begun_answer,
    text_member,
    text_part,
    thought_part,
)
from .stream import BlockEncoder, encode_event

# -- routes

_ROUTE = re.compile(rb"(?:v1(?:alpha|beta)?/)?models/(.+):(\w+)/?")
GENERATE = b"models/{model}:generateContent"
_OPERATIONS = {b"generateContent": GENERATE, b"streamGenerateContent": GENERATE}
route_of = functools.partial(read_route, pattern=_ROUTE, operations=_OPERATIONS)

# -- requests

_NAMES = {
    **{"maxOutputTokens": "max_tokens", "topP": "top_p", "topK": "top_k", "stopSequences": "stop"},
    **{"presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"},
}
_REFUSED = {"cachedContent": Refusal("contents are not kept; send the whole contents")}


def _camel(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])_([a-z])", lambda found: found[1].upper(), name)


class _Thinking(msgspec.Struct, frozen=True, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class _Gemini(Members, kw_only=True, rename="camel"):
    """The members of a request and of its ``generationConfig``."""

    contents: Annotated[list[Any], Meta(min_length=1)]
    system_instruction: Any = None
    tool_config: dict[str, Any] | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=1)] = 1
    response_mime_type: str = "text/plain"
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    thinking_config: dict[str, Any] | None = None


_MEMBERS = {*_Gemini.__struct_encode_fields__, *_NAMES, *_REFUSED, "generationConfig"}


def _members(value: Any, path: str) -> dict[str, Any]:
    """Return the members of a request: Google's in camel case, and the engine's by their own names. Raises: RequestError."""
    return {
        google if (google := _camel(name)) in _MEMBERS else name: member
        for name, member in object_of(value, path).items()
    }


def parse_request(body: bytes | dict[str, Any]) -> ModelRequest:
    """Read a request for a reply. Raises: RequestError that names the field."""
    given = _members(read_object(body), "the request body")
    config = _members(given.pop("generationConfig", None) or {}, "generationConfig")
    members = {**config, **given}
    asked, request = read_members(members, _Gemini, "gemini", names=_NAMES, refused=_REFUSED)
    if any(kind.upper() != "TEXT" for kind in asked.response_modalities or ()):
        raise unsupported("generationConfig.responseModalities", "the model writes text only")
    history = _History()
    if (text := history.system(asked.system_instruction)) != "":
        history.messages.append({"role": "system", "content": text})
    read_each(asked.contents, "contents", history.add_content)
    refuse_begun_answer(history.messages, f"contents[{len(asked.contents) - 1}]")
    request.model = asked.model.removeprefix("models/")
    request.messages = history.messages
    request.tools = [function for tool in read_each(asked.tools, "tools", _functions) for function in tool]
    request.tool_choice = _tool_choice(asked.tool_config or {}, request.tools)
    request.response_format = _response_format(asked)
    thinking = convert(_object(asked.thinking_config or {}, "thinkingConfig"), _Thinking)
    budget, level = thinking.thinking_budget, thinking.thinking_level
    request.include_thinking = bool(thinking.include_thoughts)
    if level not in (None, "THINKING_LEVEL_UNSPECIFIED"):
        request.reasoning_effort = str(level).lower()
    if budget is not None:
        request.template_kwargs = {"enable_thinking": budget != 0, **request.template_kwargs}
    request.left_out = history.left_out
    return request


def _object(value: Any, name: str) -> dict[str, Any]:
    return {_camel(member): each for member, each in object_of(value, name).items()}


def _functions(tool: dict[str, Any]) -> list[dict[str, Any]]:
    functions = []
    for declared in list_of(_object(tool, "it").get("functionDeclarations") or [], "functionDeclarations"):
        function = _object(declared, "a declaration")
        if function.get("parametersJsonSchema") is None:
            function["parametersJsonSchema"] = standard_schema(function.get("parameters"))
        functions.append(function_tool(function, "parametersJsonSchema"))
    return functions


def _tool_choice(given: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    path = "toolConfig.functionCallingConfig"
    config = _object(_object(given, "toolConfig").get("functionCallingConfig") or {}, path)
    mode = str(config.get("mode") or "AUTO").upper()
    allowed = list_of(config.get("allowedFunctionNames") or [], f"{path}.allowedFunctionNames")
    if mode == "ANY":
        return named_tool(allowed[0], tools, f"{path}.allowedFunctionNames") if len(allowed) == 1 else any_tool(tools)
    if mode not in ("AUTO", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise RequestError(f"{path}.mode must be AUTO, ANY, NONE or VALIDATED, got {mode!r}", param=f"{path}.mode")
    return "none" if mode == "NONE" else "auto"


def _response_format(asked: _Gemini) -> dict[str, Any] | None:
    if asked.response_mime_type not in ("text/plain", "application/json"):
        raise unsupported("generationConfig.responseMimeType", "it must be text/plain or application/json")
    schema = asked.response_json_schema or standard_schema(asked.response_schema)
    if schema:
        shape = {"type": "json_schema", "name": "output", "schema": schema, "strict": True}
        return json_schema(shape, "generationConfig.responseSchema")
    return {"type": "json_object"} if asked.response_mime_type == "application/json" else None


_LIMITS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def standard_schema(schema: Any) -> Any:
    """Return Google's Schema, a form of OpenAPI 3.0's, as a JSON schema. Source: ai.google.dev/api/caching#Schema."""
    if not isinstance(schema, dict):
        return schema
    given = {_camel(name): value for name, value in schema.items()}
    nullable, kind, *_ = (given.pop(name, None) for name in ("nullable", "type", "propertyOrdering", "example"))
    for name, value in given.items():
        if name in _LIMITS and isinstance(value, str):  # protobuf's JSON has strings for 64-bit numbers
            given[name] = int(value) if value.isdecimal() and len(value) < 20 else value
        elif name in ("items", "additionalProperties"):
            given[name] = standard_schema(value)
        elif name in ("anyOf", "prefixItems") and isinstance(value, list):
            given[name] = [standard_schema(each) for each in value]
        elif name in ("properties", "$defs", "defs") and isinstance(value, dict):
            given[name] = {each: standard_schema(inner) for each, inner in value.items()}
    if isinstance(kind, str) and kind != "TYPE_UNSPECIFIED":
        given = {"type": [kind.lower(), "null"] if nullable else kind.lower(), **given}
    elif nullable and isinstance(given.get("anyOf"), list):
        given["anyOf"] = [*given["anyOf"], {"type": "null"}]
    return given


_DATA = frozenset(
    {"text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult"}
)
_ABOUT_PARTS = frozenset({"thought", "thoughtSignature", "videoMetadata"})
_UPLOADED = "https://generativelanguage.googleapis.com/"  # addresses of the Files API


class _History(BlockHistory):
    """Adjacent contents of the model are one message: the provider's client keeps every event of a stream as a content."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._open: list[tuple[str, str, int]] = []  # calls without a result: id, name, and the place of their message

    def system(self, content: Any) -> str:
        """Return the text of the system's instruction. Raises: RequestError."""
        if content is None or isinstance(content, str):
            return content or ""
        return "\n".join(
            part["text"] for part in self.parts(_object(content, "systemInstruction").get("parts"), ("text",))
        )

    def add_content(self, content: dict[str, Any]) -> None:
        given = _object(content, "it")
        role, parts = given.get("role") or "user", list_of(given.get("parts") or [], "parts")
        if role not in ("user", "function", "tool", "model"):
            raise RequestError(f"role must be user or model, got {role!r}")
        if role != "model":
            self.add("user", parts)
            return
        before = self.messages.pop() if self.messages and self.messages[-1]["role"] == "assistant" else {}
        self.add("assistant", parts)
        message = self.messages[-1]
        for name in ("content", "reasoning_content", "tool_calls"):
            if name in before:
                message[name] = before[name] + message[name] if name in message else before[name]

    def kind_of(self, block: dict[str, Any]) -> tuple[str | None, Any]:
        part = _object(block, "a part")
        members = [name for name, data in part.items() if data is not None and name not in _ABOUT_PARTS]
        kinds = [name for name in members if name in _DATA]
        if len(kinds) > 1:
            raise RequestError(f"a part must have one of {', '.join(kinds)}: send a part for each")
        return next(iter(kinds + members), None), part

    def part(self, kind: str, value: Any) -> list[Part] | None:
        if kind == "text":
            text = text_member(value, "text")
            return [thought_part(text) if value.get("thought") else text_part(text)]
        if kind not in ("functionCall", "functionResponse", "inlineData", "fileData"):
            return None
        data = _object(value[kind], kind)
        if kind == "functionCall":
            call_id = str(data.get("id") or f"call_{self._calls}")
            self._calls += 1
            self._open.append((call_id, text_member(data, "name"), len(self.messages)))
            return [call_part(call_id, data, "args")]
        if kind == "functionResponse":
            answered = self._answered(text_member(data, "name"), data.get("id"))
            shown = _result_text(object_of(data.get("response") or {}, "functionResponse.response"))
            media_parts = self.parts(data.get("parts"))
            return self.result(answered, [text_part(shown), *media_parts])
        media, uri = str(data.get("mimeType") or ""), str(data.get("fileUri") or "")
        if not media.startswith("image/"):
            return None
        if kind == "inlineData":
            return [image_part({"url": f"data:{media};base64,{data.get('data')}"})]
        public = uri.startswith(("http:", "https:")) and not uri.startswith(_UPLOADED)
        return [image_part({"url": uri if public else None})]

    def _answered(self, name: str, call_id: Any) -> str:
        """Return the id of the call that a result answers.

        Many clients leave out the ids. A result is then that of the first open call of its name in the latest message that has
        one.
        """
        named = [call for call in self._open if call[1] == name]
        same = [call for call in self._open if call[0] == call_id] or [
            call for call in named if call[2] == named[-1][2]
        ]
        if not same:
            return str(call_id or name)
        self._open.remove(same[0])
        return same[0][0]


def _result_text(response: dict[str, Any]) -> str:
    """Return a tool's result as text. An object with the only member ``output`` or ``result`` stands for that member."""
    if len(response) == 1:
        [(name, value)] = response.items()
        if name in ("output", "result") and isinstance(value, str):
            return value
    return json.dumps(response, ensure_ascii=False)


# -- replies

_FINISH = {LENGTH: "MAX_TOKENS", CONTENT_FILTER: "SAFETY"}
# Google's codes, by HTTP status. Source: github.com/googleapis/googleapis, google/rpc/code.proto
_STATUS = {
    **{400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"},
    **{405: "UNIMPLEMENTED", 408: "DEADLINE_EXCEEDED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL"},
    **{502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"},
}
TOO_LONG = "The input token count exceeds the maximum number of tokens allowed"  # agents look for these words


def usage_dict(usage: Usage) -> dict[str, Any]:
    prompt, completion, thoughts = usage.prompt_tokens or 0, usage.completion_tokens or 0, usage.reasoning_tokens or 0
    shown = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": max(completion - thoughts, 0),
        "totalTokenCount": prompt + completion,
    }
    more = {"thoughtsTokenCount": thoughts, "cachedContentTokenCount": usage.cached}
    return {**shown, **{name: count for name, count in more.items() if count}}


def error_dict(error: RequestError) -> dict[str, Any]:
    message, field = error.message, field_at_fault(error, "contents")
    if error.kind == "context_overflow":
        message = f"{TOO_LONG}. {message}"
    elif field is not None and field not in message:
        message = f"{field}: {message}"
    status = error.status or KINDS[error.kind][0]
    return {"error": {"code": status, "message": message, "status": _STATUS.get(status, "INVALID_ARGUMENT")}}


class Encoder(BlockEncoder):
    """Deltas -> the bytes of a stream, and at the end the whole reply. Calls come whole, in the last event."""

    def start(self) -> bytes:
        return b""

    def feed(self, delta: Delta) -> bytes:
        return super().feed(delta) or (IDLE if delta.reasoning else b"")  # thinking that is left out shows life

    def ping(self) -> bytes:
        return IDLE

    def opened(self, kind: str) -> bytes:
        self.content.append({})
        return b""

    def piece(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        return encode_event(self._reply([_text(kind, text)])) if text else b""

    def closed(self, kind: str, text: str, *, last: bool) -> bytes:
        self.content[-1] = _text(kind, text)
        return b""

    def call(self, call: ToolCall, place: int, *, last: bool) -> bytes:
        call_id = call.id or own_id("call_", self.reply_id, place)
        named = {"id": call_id, "name": call.name, "args": tool_input(call.arguments)}
        self.content.append({"functionCall": named})
        return b""

    def ended(self) -> bytes:
        calls = [part for part in self.content if "functionCall" in part]
        self.body = self._reply(self.content, last=True)
        return encode_event(self._reply(calls or [{"text": ""}], last=True))

    def error(self, error: RequestError) -> bytes:
        return encode_event(error_dict(error))

    def _reply(self, parts: list[dict[str, Any]], *, last: bool = False) -> dict[str, Any]:
        finish = {"finishReason": _FINISH.get(self.finish_reason or "", "STOP")} if last else {}
        candidate = {"content": {"parts": parts, "role": "model"}, **finish, "index": 0}
        usage = {"usageMetadata": usage_dict(self.usage)} if last else {}
        return {"candidates": [candidate], **usage, "modelVersion": self.model, "responseId": self.reply_id}


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"text": text, "thought": True} if kind == "reasoning" else {"text": text}


# An empty line. The provider's Python client reads the lines of comments as JSON.
IDLE = b"\n"
