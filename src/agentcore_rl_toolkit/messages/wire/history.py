"""The parts of a request that all dialects have in common: contents, calls, tools, and the choice of a tool."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import RequestError, unsupported

Part = dict[str, Any]
Message = dict[str, Any]

# The types of canonical parts: of a content, of the user's messages, and of the model's.
CONTENT = ("text", "image_url")
_USER = (*CONTENT, "result")
_ANSWER = ("text", "thought", "call")


class History:
    """Reads the history of one request. Each dialect has a subclass.

    ``left_out`` counts the items, parts and fields that the model does not get as they were sent, by kind.
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()

    def kind_of(self, block: dict[str, Any]) -> tuple[str | None, Any]:
        """Return the kind and the value of a block. None: it is empty. Raises: RequestError."""
        kind = block.get("type")
        if not isinstance(kind, str):
            raise RequestError("each part of a content needs a type")
        return kind, block

    def part(self, kind: str, value: Any) -> list[Part] | None:
        """Return a block of a content as canonical parts. None: the model cannot read it. Raises: RequestError."""
        raise NotImplementedError

    def parts(self, content: Any, types: tuple[str, ...] = CONTENT) -> list[Part]:
        """Return a content as canonical parts of these types, with a text in place of each other block.

        In an answer of the model, other blocks are left out. Raises: RequestError.
        """
        if content is None or isinstance(content, str):
            return [text_part(content)] if content else []
        found: list[Part] = []
        for block in list_of(content, "a content"):
            kind, value = self.kind_of(object_of(block, "each part of a content"))
            if kind is None:
                continue
            parts = self.part(kind, value)
            if parts is None or not all(part["type"] in types for part in parts):
                self.left_out[kind] += 1
                parts = [] if types is _ANSWER else [unread_part(kind)]
            found += parts
        return found

    def result_parts(self, result: Any) -> list[Part]:
        """Return a tool's result as canonical parts. A result that is no content (null, a number, an object) becomes JSON.

        Raises: RequestError.
        """
        if isinstance(result, str | list):
            return self.parts(result)
        return [text_part(json.dumps(result, ensure_ascii=False))]

    def document(self, heads: Iterable[Any], text: Any, content: Any, kind: Any) -> list[Part]:
        """Return the texts of a document: its heads, and its text or content. A document without text (a PDF) becomes a line.

        Raises: RequestError.
        """
        shown = [text_part(head) for head in heads if isinstance(head, str)]
        if isinstance(text, str):
            return [*shown, text_part(text)]
        if content is not None:
            return shown + self.parts(content)
        self.left_out["document"] += 1
        line = f"[document ({kind}): the model reads text only; extract the text with another tool]"
        return [*shown, text_part(line)]


class BlockHistory(History):
    """Reads messages whose contents are blocks, among them calls and the results of tools."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def add_message(self, message: dict[str, Any]) -> None:
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"role must be user, assistant or system, got {role!r}")
        if (content := message.get("content")) is None:
            raise RequestError("content is required")
        self.add(role, content)

    def add(self, role: str, content: Any) -> None:
        """Add a content. Tool results become separate messages, in front of the user's text. Raises: RequestError."""
        if role == "assistant":
            self.messages.append(answer_message(self.parts(content, _ANSWER)))
            return
        parts = self.parts(content, _USER)
        self.messages += [part["message"] for part in parts if part["type"] == "result"]
        said = [part for part in parts if part["type"] != "result"]
        if said or not parts:
            self.messages.append({"role": role, "content": joined(said, "\n")})

    def result(self, call_id: str, parts: list[Part], *, failure: str | None = None) -> list[Part]:
        """Return a tool's result. ``failure`` is the member that tells of a failed call.

        No chat template reads such a member, so a failure without a text gets one: it would look like a success that found
        nothing.
        """
        content = joined(parts, "\n")
        if failure is not None and not text_of(content).strip():
            content = "The tool failed and said nothing."
        elif failure is not None:
            self.left_out[failure] += 1
        return [{"type": "result", "message": {"role": "tool", "tool_call_id": call_id, "content": content}}]


def read_each(values: list[Any], path: str, read: Callable[[dict[str, Any]], Any]) -> list[Any]:
    found = []
    for i, value in enumerate(values):
        try:
            if not isinstance(value, dict):
                raise RequestError("it must be an object")
            found.append(read(value))
        except RequestError as e:
            raise RequestError(f"{path}[{i}]: {e.message}", kind=e.kind, param=f"{path}[{i}]") from e
    return found


def unread_part(kind: str) -> Part:
    return text_part(f"[{kind}: the model reads text only]")


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def thought_part(text: str) -> Part:
    return {"type": "thought", "text": text}


def image_part(image: Any) -> Part:
    """Return a part with an image. ``image`` has its URL, and may have a ``detail``. Raises: RequestError."""
    if not isinstance(object_of(image, "image_url").get("url"), str):
        how = "send the image's data (base64 or a data URL), or its URL"
        raise unsupported("image", f"it has no URL that engines can read, and uploaded files are not kept; {how}")
    return {"type": "image_url", "image_url": image}


def in_call_order(messages: list[Message]) -> list[Message]:
    """Return the messages with the results of parallel calls in the order of the calls: without ids, the order decides."""
    found: list[Message] = []
    places: dict[str, int] = {}
    for role, group in itertools.groupby(messages, lambda message: message["role"]):
        run = list(group)
        if role == "tool":
            run.sort(key=lambda message: places.get(str(message.get("tool_call_id")), len(places)))
        else:
            calls = [call for message in run for call in message.get("tool_calls") or ()]
            places = {str(call.get("id")): place for place, call in enumerate(calls)}
        found += run
    return found


def joined(parts: list[Part], between: str = "") -> str | list[Part]:
    """Join the parts of a content to one string if all of them are text."""
    return between.join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, None, or parts, whose texts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


def list_of(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list", param=name)
    return value


def object_of(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object", param=name)
    return value


def text_member(item: dict[str, Any], name: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a string", param=name)
    return text


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_part(call_id: str, call: dict[str, Any], member: str) -> Part:
    """Return a call whose arguments are the object ``call[member]``. Raises: RequestError.

    Its text has the blanks that models and chat templates write, so that an engine that receives it sees the sampled tokens.
    """
    arguments = json.dumps(object_of(call.get(member) or {}, member), ensure_ascii=False)
    return {"type": "call", "call": tool_call(call_id, text_member(call, "name"), arguments)}


def answer_message(parts: list[Part]) -> Message:
    message: Message = {"role": "assistant", "content": "".join(p["text"] for p in parts if p["type"] == "text")}
    if thoughts := [part["text"] for part in parts if part["type"] == "thought"]:
        message["reasoning_content"] = "".join(thoughts)
    if calls := [part["call"] for part in parts if part["type"] == "call"]:
        message["tool_calls"] = calls
    return message


def refuse_begun_answer(messages: list[Message], last: str) -> None:
    """Raise RequestError if the last message, whose path is ``last``, is the model's."""
    if messages[-1]["role"] == "assistant":
        raise unsupported(last, "the model must write the whole answer; end with a user message")


def function_tool(tool: dict[str, Any], parameters: str) -> dict[str, Any]:
    """Return a tool as a function. ``parameters`` is the member of the tool with its schema. Raises: RequestError."""
    function: dict[str, Any] = {"name": text_member(tool, "name")}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = tool.get(parameters) or {"type": "object", "properties": {}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def named_tool(name: Any, tools: list[dict[str, Any]], path: str) -> str:
    if not any(tool["function"]["name"] == name for tool in tools):
        raise RequestError(f"{path}: there is no tool named {name!r}", param="tool_choice")
    return f"tool:{name}"


def any_tool(tools: list[dict[str, Any]]) -> str:
    if not tools:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    return "required"


def tool_choice(choice: str | dict[str, Any], tools: list[dict[str, Any]], *path: str) -> str:
    """Convert OpenAI's tool choice, a word or an object that names a tool, to canonical form. Raises: RequestError."""
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise RequestError(f"tool_choice must be auto, none or required, got {choice!r}", param="tool_choice")
        return any_tool(tools) if choice == "required" else choice
    if choice.get("type") == "allowed_tools":
        mode = choice.get("mode") or (choice.get("allowed_tools") or {}).get("mode")
        return "required" if mode == "required" and tools else "auto"
    if choice.get("type") not in ("function", "custom"):
        raise unsupported("tool_choice.type", "only functions can be required; use auto")
    named: Any = choice
    for name in path:
        named = named.get(name) if isinstance(named, dict) else None
    return named_tool(named, tools, ".".join(("tool_choice", *path)))


def json_schema(shape: dict[str, Any], path: str) -> dict[str, Any]:
    if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise unsupported(path, "it must be a json_schema with a schema")
    schema = {k: v for k, v in shape.items() if k in ("name", "schema", "strict", "description") and v is not None}
    return {"type": "json_schema", "json_schema": schema}
