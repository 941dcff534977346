"""Gemini's generateContent. Source: ai.google.dev/api/generate-content.

The model and the choice between a whole and a streamed reply are parts of the path (`route_of`). `with_members` adds them to the
body, so that a request is complete in its body, as it is in the other dialects. Members may be written in snake case, as in
protobuf's JSON.
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
from .chat import MAX_N
from .fields import Members, Refusal, Route, convert, read_members, read_object, read_route, with_path
from .history import (
    History,
    Message,
    Part,
    any_tool,
    function_tool,
    image_part,
    joined,
    json_schema,
    list_at,
    named_tool,
    object_at,
    object_call,
    refuse_begun_answer,
    text_member,
    text_of,
    text_part,
)
from .stream import CollectedCalls, encode_event

# -- routes

_ROUTE = re.compile(rb"(?:v1(?:alpha|beta)?/)?models/(.+):(\w+)/?")
GENERATE, COUNT = b"models/{model}:generateContent", b"models/{model}:countTokens"
_OPERATIONS = {b"generateContent": GENERATE, b"streamGenerateContent": GENERATE, b"countTokens": COUNT}
route_of = functools.partial(read_route, pattern=_ROUTE, operations=_OPERATIONS)


def with_members(body: bytes, route: Route, query: bytes) -> bytes:
    """Return a request's body with the members that are in its path. Raises: RequestError."""
    if route.stream and b"alt=sse" not in query.split(b"&"):
        raise RequestError("a streamed reply is sent as events: ask for streamGenerateContent?alt=sse", param="alt")
    return with_path(body, route)


# -- requests

_NAMES = {
    **{"maxOutputTokens": "max_tokens", "topP": "top_p", "topK": "top_k", "stopSequences": "stop"},
    **{"presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"},
}
_FIELD_NAMES = {
    **{canonical: f"generationConfig.{name}" for name, canonical in _NAMES.items()},
    "seed": "generationConfig.seed",
    "n": "generationConfig.candidateCount",
    "tool_choice": "toolConfig.functionCallingConfig.mode",
    "response_format": "generationConfig.responseSchema",
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
    candidate_count: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    response_mime_type: str = "text/plain"
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[str] | None = None
    thinking_config: dict[str, Any] | None = None


_MEMBERS = {*_Gemini.__struct_encode_fields__, *_NAMES, *_REFUSED, "generationConfig", "generateContentRequest"}


def _members(value: Any, path: str) -> dict[str, Any]:
    """Return the members of a request: Google's in camel case, and the engine's by their own names. Raises: RequestError."""
    return {
        google if (google := _camel(name)) in _MEMBERS else name: member
        for name, member in object_at(value, path).items()
    }


def parse_request(body: bytes | dict[str, Any], *, counting: bool = False) -> ModelRequest:
    """Read a request for a reply; ``counting`` for a count of tokens, where the model may have the last word.

    Raises: RequestError that names the field.
    """
    given = _members(read_object(body), "the request body")
    if given.get("generateContentRequest") is not None:  # one form of countTokens
        given = {**_members(given.pop("generateContentRequest"), "generateContentRequest"), **given}
    config = _members(given.pop("generationConfig", None) or {}, "generationConfig")
    members = {**config, **given}
    asked, request = read_members(members, _Gemini, "gemini", names=_NAMES, field_names=_FIELD_NAMES, refused=_REFUSED)
    if any(kind.upper() != "TEXT" for kind in asked.response_modalities or ()):
        raise unsupported("generationConfig.responseModalities", "the model writes text only")
    history = _History()
    for i, content in enumerate(asked.contents):
        history.add(content, f"contents[{i}]")
    if not counting:
        refuse_begun_answer(history.messages, f"contents[{len(asked.contents) - 1}]")
    request.model = asked.model.removeprefix("models/")
    request.messages = history.system(asked.system_instruction) + history.messages
    request.tools = [f for i, tool in enumerate(asked.tools) for f in _functions(tool, f"tools[{i}]")]
    request.tool_choice = _tool_choice(asked.tool_config or {}, request.tools)
    request.n, request.response_format = asked.candidate_count, _response_format(asked)
    thinking = convert(_object(asked.thinking_config or {}, "thinkingConfig"), _Thinking)
    budget, level = thinking.thinking_budget, thinking.thinking_level
    request.include_thinking = bool(thinking.include_thoughts)
    if level not in (None, "THINKING_LEVEL_UNSPECIFIED"):
        request.reasoning_effort = str(level).lower()
    if budget is not None:
        request.template_kwargs = {"enable_thinking": budget != 0, **request.template_kwargs}
    request.left_out = history.left_out
    return request


def _object(value: Any, path: str) -> dict[str, Any]:
    """Return an object with its members in camel case. Raises: RequestError."""
    return {_camel(name): member for name, member in object_at(value, path).items()}


def _functions(tool: Any, path: str) -> list[dict[str, Any]]:
    """Return the functions of a tool, none for a tool of the provider. Raises: RequestError."""
    functions = []
    path += ".functionDeclarations"
    for i, declared in enumerate(list_at(_object(tool, path).get("functionDeclarations") or [], path)):
        function = _object(declared, f"{path}[{i}]")
        name = text_member(function, "name", f"{path}[{i}]")
        if function.get("parametersJsonSchema") is None:
            function["parametersJsonSchema"] = standard_schema(function.get("parameters"))
        functions.append(function_tool(name, function, "parametersJsonSchema"))
    return functions


def _tool_choice(given: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    path = "toolConfig.functionCallingConfig"
    config = _object(_object(given, "toolConfig").get("functionCallingConfig") or {}, path)
    mode, path_of_names = str(config.get("mode") or "AUTO").upper(), f"{path}.allowedFunctionNames"
    allowed = list_at(config.get("allowedFunctionNames") or [], path_of_names)
    if mode == "ANY":
        return named_tool(allowed[0], tools, path_of_names) if len(allowed) == 1 else any_tool(tools)
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


def _part(given: Any, path: str) -> tuple[str | None, Part]:
    """Return the member with a part's data, None if it is empty, and the part with its members in camel case.

    Raises: RequestError if it has several kinds of data, of which one would be lost.
    """
    part = _object(given, path)
    members = [name for name, data in part.items() if data is not None and name not in _ABOUT_PARTS]
    kinds = [name for name in members if name in _DATA]
    if len(kinds) > 1:
        raise RequestError(f"{path} must have one of {', '.join(kinds)}: send a part for each", param=path)
    return next(iter(kinds + members), None), part


class _History(History):
    """Adjacent contents of the model are one message: the provider's client keeps every event of a stream as a content."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self._calls = 0
        self._open: list[tuple[str, str, int]] = []  # calls without a result: id, name, and the place of their message

    def system(self, content: Any) -> list[Message]:
        """Return the system's instruction as a message, if it has a text. Raises: RequestError."""
        if content is None:
            return []
        given = {"parts": [{"text": content}]} if isinstance(content, str) else _object(content, "systemInstruction")
        text = "\n".join(map(text_of, ([part] for part in self.parts(given.get("parts"), "systemInstruction.parts"))))
        return [{"role": "system", "content": text}] if text else []

    def add(self, content: Any, path: str) -> None:
        """Read a content. Raises: RequestError."""
        given = _object(content, path)
        role = given.get("role") or "user"
        parts, where = list_at(given.get("parts") or [], f"{path}.parts"), f"{path}.parts"
        if role == "model":
            self._model(parts, where)
        elif role in ("user", "function", "tool"):
            self.messages += self.user_messages("user", parts, where)
        else:
            raise RequestError(f"{path}.role must be user or model, got {role!r}", param=f"{path}.role")

    def read_part(self, part: Any, path: str) -> list[Part]:
        kind, given = _part(part, path)
        return [] if kind is None else super().read_part({**given, "type": kind}, path)

    def _model(self, parts: list[Any], path: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        message = self.messages[-1]
        for i, given in enumerate(parts):
            where = f"{path}[{i}]"
            kind, part = _part(given, where)
            if kind == "text":
                member = "reasoning_content" if part.get("thought") else "content"
                message[member] = message.get(member, "") + text_member(part, "text", where)
            elif kind == "functionCall":
                message.setdefault("tool_calls", []).append(self._call(part[kind], f"{where}.{kind}"))
            elif kind is not None:
                self.left_out[kind] += 1

    def _call(self, given: Any, path: str) -> dict[str, Any]:
        call = object_at(given, path)
        name, call_id = text_member(call, "name", path), str(call.get("id") or f"call_{self._calls}")
        self._calls += 1
        self._open.append((call_id, name, len(self.messages)))
        return object_call(call_id, call, "args", path)

    def result(self, block: Any, path: str) -> Message | None:
        kind, part = _part(block, path)
        if kind != "functionResponse":
            return None
        path = f"{path}.functionResponse"
        response = object_at(part["functionResponse"], path)
        name, call_id = text_member(response, "name", path), response.get("id")
        # Many clients leave out the ids. A result is then that of the first open call of its name in the latest message
        # that has one.
        answered = next((call for call in self._open if call[0] == call_id), None)
        named = [call for call in self._open if call[1] == name]
        answered = answered or next((call for call in named if call[2] == named[-1][2]), None)
        if answered is not None:
            self._open.remove(answered)
        content = text_part(_result_text(object_at(response.get("response") or {}, f"{path}.response")))
        more = self.parts(response.get("parts"), f"{path}.parts")  # parts of a result with media
        answers = answered[0] if answered is not None else str(call_id or name)
        return {"role": "tool", "tool_call_id": answers, "content": joined([content, *more], "\n")}

    def part(self, kind: str, part: Part, path: str) -> list[Part] | None:
        if kind == "text":
            return [text_part(text_member(part, "text", path))]
        if kind not in ("inlineData", "fileData"):
            return None
        data = _object(part[kind], f"{path}.{kind}")
        media, uri = str(data.get("mimeType") or ""), str(data.get("fileUri") or "")
        if kind == "inlineData" and media.startswith("image/"):
            return [image_part({"url": f"data:{media};base64,{data.get('data')}"}, path)]
        if media.startswith("image/") and uri.startswith(("http:", "https:")):
            return [image_part({"url": uri}, path)]
        return None


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
    """Return the body of an error. The message contains the field at fault."""
    message, field = error.message, field_at_fault(error, "contents")
    if error.kind == "context_overflow":
        message = f"{TOO_LONG}. {message}"
    elif field is not None and field not in message:
        message = f"{field}: {message}"
    status = error.status or KINDS[error.kind][0]
    return {"error": {"code": status, "message": message, "status": _STATUS.get(status, "INVALID_ARGUMENT")}}


def _calls(calls: list[ToolCall], reply_id: str) -> list[dict[str, Any]]:
    ids = [call.id or own_id("call_", reply_id, place) for place, call in enumerate(calls)]
    shown = [{"name": call.name, "args": tool_input(call.arguments)} for call in calls]
    return [{"functionCall": {"id": i, **call}} for i, call in zip(ids, shown, strict=True)]


def _candidate(index: int, parts: list[dict[str, Any]], finish: str | None = None) -> dict[str, Any]:
    ended = {} if finish is None else {"finishReason": _FINISH.get(finish, "STOP")}
    return {"content": {"parts": parts, "role": "model"}, **ended, "index": index}


def _body(candidates: list[dict[str, Any]], model: str, reply_id: str, **more: Any) -> dict[str, Any]:
    return {"candidates": candidates, **more, "modelVersion": model, "responseId": reply_id}


class Encoder:
    """Deltas -> the bytes of a stream, and at the end the whole reply. Calls come whole, in the last event."""

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self._request = request
        self._model, self._id = model or request.model, reply_id
        self._usage = request.counted or Usage()
        self._texts: list[list[dict[str, Any]]] = [[] for _ in range(request.n)]
        self._calls = [CollectedCalls() for _ in range(request.n)]
        self._finish: list[str | None] = [None] * request.n

    def start(self) -> bytes:
        return b""

    def feed(self, delta: Delta) -> bytes:
        self._usage = delta.usage or self._usage
        if delta.choice >= len(self._calls):
            return b""
        self._calls[delta.choice].add(delta.tool_calls)
        self._finish[delta.choice] = delta.finish_reason or self._finish[delta.choice]
        thought = delta.reasoning if self._request.include_thinking else ""
        parts: list[dict[str, Any]] = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": text} for text in (delta.text, delta.refusal) if text]
        self._texts[delta.choice] += parts
        return self._event([_candidate(delta.choice, parts)]) if parts else (IDLE if delta.reasoning else b"")

    def ping(self) -> bytes:
        return IDLE

    def finish(self) -> bytes:
        """Encode the last event of every candidate, with the usage."""
        calls = [_calls(each.all(), self._id) for each in self._calls]
        whole = [texts + own for texts, own in zip(self._texts, calls, strict=True)]
        usage = usage_dict(self._usage)
        self.body = _body(self._ended(whole), self._model, self._id, usageMetadata=usage)
        return self._event(self._ended(calls), usageMetadata=usage)

    def _ended(self, parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [_candidate(i, p or [{"text": ""}], self._finish[i] or "stop") for i, p in enumerate(parts)]

    def error(self, error: RequestError) -> bytes:
        return encode_event(error_dict(error))

    def _event(self, candidates: list[dict[str, Any]], **more: Any) -> bytes:
        return encode_event(_body(candidates, self._model, self._id, **more))


# An empty line. The provider's Python client reads the lines of comments as JSON.
IDLE = b"\n"
