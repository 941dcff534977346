"""The parts of a request that all dialects have in common: contents, calls, tools, and the choice of a tool."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..errors import RequestError, unsupported

Part = dict[str, Any]
Message = dict[str, Any]


class History:
    """Reads the history of one request. Each dialect has a subclass.

    ``left_out`` counts the items, parts and fields that the model does not get as they were sent, by kind.
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()

    def part(self, kind: str, part: Part, path: str) -> list[Part] | None:
        """Return a part of a content as canonical parts. None: the model cannot read it. Raises: RequestError."""
        raise NotImplementedError

    def parts(self, content: Any, path: str) -> list[Part]:
        """Return a content as canonical parts, with a text in place of a part that the model cannot read.

        Raises: RequestError.
        """
        if content is None or isinstance(content, str):
            return [text_part(content)] if content else []
        return [p for i, part in enumerate(list_at(content, path)) for p in self.read_part(part, f"{path}[{i}]")]

    def result_parts(self, result: Any, path: str) -> list[Part]:
        """Return a tool's result as canonical parts. A result that is no content (null, a number, an object) becomes JSON.

        Raises: RequestError.
        """
        if isinstance(result, str | list):
            return self.parts(result, path)
        return [text_part(json.dumps(result, ensure_ascii=False))]

    def read_part(self, part: Any, path: str) -> list[Part]:
        """Return one part of a content as canonical parts. Raises: RequestError."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{path}.type is required", param=f"{path}.type")
        read = self.part(kind, part, path)
        if read is not None:
            return read
        self.left_out[kind] += 1
        return [unread_part(kind)]

    def result(self, block: Any, path: str) -> Message | None:
        """Return a tool's result as a message. None: it is another block. Raises: RequestError."""
        raise NotImplementedError

    def user_messages(self, role: str, blocks: list[Any], path: str) -> list[Message]:
        """Return tool results as separate messages, in front of the user's text. Raises: RequestError."""
        messages: list[Message] = []
        parts: list[Part] = []
        for i, block in enumerate(blocks):
            result = self.result(block, f"{path}[{i}]")
            if result is None:
                parts += self.read_part(block, f"{path}[{i}]")
            else:
                messages.append(result)
        if parts or not messages:
            messages.append({"role": role, "content": joined(parts, "\n")})
        return messages

    def tool_result(self, call_id: str, parts: list[Part], *, failure: str | None) -> Message:
        """Return a tool's message. ``failure`` is the member that tells of a failed call.

        No chat template reads such a member, so a failure without a text gets one: it would look like a success that found
        nothing.
        """
        content = joined(parts, "\n")
        if failure is not None and not text_of(content).strip():
            content = "The tool failed and said nothing."
        elif failure is not None:
            self.left_out[failure] += 1
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    def document(self, heads: Iterable[Any], text: Any, content: Any, path: str, kind: Any) -> list[Part]:
        """Return the texts of a document: its heads, and its text or content. A document without text (a PDF) becomes a line.

        Raises: RequestError.
        """
        shown = [text_part(head) for head in heads if isinstance(head, str)]
        if isinstance(text, str):
            return [*shown, text_part(text)]
        if content is not None:
            return shown + self.parts(content, path)
        self.left_out["document"] += 1
        return [
            *shown,
            text_part(f"[document ({kind}): the model reads text only; extract the text with another tool]"),
        ]


class BlockHistory(History):
    """Reads messages whose contents are blocks, among them the results of tools."""

    def answer(self, blocks: list[Any], path: str) -> Message:
        """Return a message of the model. Raises: RequestError."""
        raise NotImplementedError

    def all(self, messages: list[Any], *, whole: bool) -> list[Message]:
        """Return messages as canonical ones: tool results become separate messages, in front of the user's text.

        Raises: RequestError, also if the last message is the model's and the request is ``whole``.
        """
        found: list[Message] = []
        for i, message in enumerate(objects_at(messages, "messages")):
            path, role, content = f"messages[{i}]", message.get("role"), message.get("content")
            if role not in ("user", "assistant", "system"):
                raise RequestError(f"{path}.role must be user, assistant or system", param=f"{path}.role")
            if isinstance(content, str):
                found.append({"role": role, "content": content})
            elif role == "assistant":
                found.append(self.answer(list_at(content, f"{path}.content"), f"{path}.content"))
            else:
                found += self.user_messages(role, list_at(content, f"{path}.content"), f"{path}.content")
        if whole:
            refuse_begun_answer(found, f"messages[{len(messages) - 1}]")
        return found


def unread_part(kind: str) -> Part:
    """Return the text that replaces a part that the model cannot read."""
    return text_part(f"[{kind}: the model reads text only]")


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(image: Any, path: str) -> Part:
    """Return a part with an image. ``image`` has its URL, and may have a ``detail``. Raises: RequestError."""
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise RequestError(f"{path}.image_url.url must be a string", param=f"{path}.image_url")
    return {"type": "image_url", "image_url": image}


def without_images(messages: list[Message]) -> tuple[list[Message], int]:
    """Replace each image in the messages with a line of text. Return the messages and the number of images."""
    count, found = 0, []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") == "image_url" for part in content):
            count += sum(part.get("type") == "image_url" for part in content)
            shown = [unread_part("image") if part.get("type") == "image_url" else part for part in content]
            message = {**message, "content": joined(shown)}
        found.append(message)
    return found, count


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


def list_at(value: Any, path: str) -> list[Any]:
    """Return the value if it is a list. Raises: RequestError."""
    if not isinstance(value, list):
        raise RequestError(f"{path} must be a string or a list", param=path)
    return value


def object_at(value: Any, path: str) -> dict[str, Any]:
    """Return the value if it is an object. Raises: RequestError."""
    if not isinstance(value, dict):
        raise RequestError(f"{path} must be an object", param=path)
    return value


def objects_at(values: list[Any], path: str) -> list[dict[str, Any]]:
    """Return the values if all are objects. Raises: RequestError."""
    return [object_at(value, f"{path}[{i}]") for i, value in enumerate(values)]


def text_member(item: dict[str, Any], name: str, path: str) -> str:
    """Return a member that must be a string. Raises: RequestError."""
    text = item.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return text


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def object_call(call_id: str, call: dict[str, Any], member: str, path: str) -> dict[str, Any]:
    """Return a call whose arguments are the object ``call[member]``. Raises: RequestError.

    Its text has the blanks that models and chat templates write, so that an engine that receives it sees the sampled tokens.
    """
    arguments = json.dumps(object_at(call.get(member) or {}, f"{path}.{member}"), ensure_ascii=False)
    return tool_call(call_id, text_member(call, "name", path), arguments)


def answer_message(texts: list[str], thoughts: list[str], calls: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def refuse_begun_answer(messages: list[Message], last: str) -> None:
    """Raise RequestError if the last message, whose path is ``last``, is the model's."""
    if messages[-1]["role"] == "assistant":
        raise unsupported(last, "the model must write the whole answer; end with a user message")


def function_tool(name: str, tool: dict[str, Any], parameters: str) -> dict[str, Any]:
    """Return a tool as a function. ``parameters`` is the member of the tool with its schema."""
    function: dict[str, Any] = {"name": name}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = tool.get(parameters) or {"type": "object", "properties": {}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def named_tool(name: Any, tools: list[dict[str, Any]], path: str) -> str:
    """Return the canonical choice of a tool by its name. Raises: RequestError."""
    if not any(tool["function"]["name"] == name for tool in tools):
        raise RequestError(f"{path}: there is no tool named {name!r}", param="tool_choice")
    return f"tool:{name}"


def any_tool(tools: list[dict[str, Any]]) -> str:
    """Return the canonical choice of any tool. Raises: RequestError."""
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
    """Return a response format with the schema of ``shape``. Raises: RequestError."""
    if shape.get("type") != "json_schema" or not isinstance(shape.get("schema"), dict):
        raise unsupported(path, "it must be a json_schema with a schema")
    schema = {k: v for k, v in shape.items() if k in ("name", "schema", "strict", "description") and v is not None}
    return {"type": "json_schema", "json_schema": schema}
