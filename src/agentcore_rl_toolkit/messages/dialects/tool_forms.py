"""Tools of the Responses API that are no functions: the model gets them as functions, the agent gets their calls in the form
that it declared. Source: platform.openai.com/docs/api-reference/responses, tool and item types.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import NOT_JSON, RequestError
from .arguments import value_of
from .canonical import ToolForm
from .fields import text_member

_STRING, _NUMBER = {"type": "string"}, {"type": "integer"}
_STRINGS = {"type": "array", "items": _STRING}
_ITEMS = {
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
    "shell": "shell_call",
    "apply_patch": "apply_patch_call",
}
_KINDS = {item: kind for kind, item in _ITEMS.items()}
OUTPUTS = frozenset({"function_call_output", *(f"{item}_output" for item in _ITEMS.values())})
_MEMBER = {"local_shell": "action", "shell": "action", "apply_patch": "operation"}
_PARAMETERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "local_shell": (
        "Run a command.",
        {"command": _STRINGS, "working_directory": _STRING, "timeout_ms": _NUMBER},
        ["command"],
    ),
    "shell": (
        "Run shell commands.",
        {"commands": _STRINGS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER},
        ["commands"],
    ),
    "apply_patch": (
        "Create, update or delete a file by a diff.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _STRING,
            "diff": _STRING,
        },
        ["type", "path"],
    ),
}


def functions(tool: Any, path: str, forms: dict[str, ToolForm]) -> list[dict[str, Any]]:
    """The functions that stand for a tool, none for a hosted one; ``forms`` learns their names. Raises: RequestError."""
    if not isinstance(tool, dict):
        raise RequestError(f"{path} must be an object", param=path)
    kind = str(tool.get("type"))
    if kind in _PARAMETERS:
        description, properties, required = _PARAMETERS[kind]
        forms[kind] = ToolForm(kind, kind)
        return [_function(kind, description, properties, required)]
    if kind not in ("function", "custom", "namespace"):
        return []
    name = text_member(tool, "name", path)
    if kind == "namespace":
        return _flattened(tool, name, path, forms)
    if kind == "custom":
        forms[name] = ToolForm(kind, name)
        shape, described = tool.get("format") or {}, str(tool.get("description") or "")
        if shape.get("definition"):
            described += f"\n\nThe input follows this grammar ({shape.get('syntax')}):\n{shape['definition']}"
        return [_function(name, described, {"input": _STRING}, ["input"])]
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return [{"type": "function", "function": function}]


def _function(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _flattened(tool: dict[str, Any], namespace: str, path: str, forms: dict[str, ToolForm]) -> list[dict[str, Any]]:
    inner: dict[str, ToolForm] = {}
    found: list[dict[str, Any]] = []
    for i, each in enumerate(tool.get("tools") or []):
        for function in functions(each, f"{path}.tools[{i}]", inner):
            name = function["function"]["name"]
            kind = inner[name].kind if name in inner else "function"
            flat = flat_name(namespace, name)
            forms[flat] = ToolForm(kind, name, namespace)
            found.append({**function, "function": {**function["function"], "name": flat}})
    return found


def flat_name(namespace: Any, name: str) -> str:
    """The name under which the model knows a function of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if isinstance(namespace, str) and namespace else name


def call_of(item: dict[str, Any], path: str) -> tuple[str, str] | None:
    """Name and arguments of a call in any form, as the model wrote it; None when the item is no call."""
    kind = item.get("type")
    if kind == "function_call":
        return flat_name(item.get("namespace"), text_member(item, "name", path)), text_member(
            item, "arguments", path
        ) or "{}"
    form = _KINDS.get(str(kind))
    if form is None:
        return None
    if form == "custom":
        arguments: Any = {"input": text_member(item, "input", path)}
        return flat_name(item.get("namespace"), text_member(item, "name", path)), json.dumps(
            arguments, ensure_ascii=False
        )
    arguments = item.get(_MEMBER[form])
    if not isinstance(arguments, dict):
        raise RequestError(f"{path}.{_MEMBER[form]} must be an object", param=f"{path}.{_MEMBER[form]}")
    if form != "apply_patch":
        named = _PARAMETERS[form][1]
        arguments = {name: value for name, value in arguments.items() if name in named and value is not None}
    return form, json.dumps(arguments, ensure_ascii=False)


def output_of(item: dict[str, Any]) -> Any:
    """The result of a call in any form; a shell's list of outcomes as text."""
    output = item.get("output")
    if item["type"] != "shell_call_output" or not isinstance(output, list):
        return output
    texts = []
    for part in output:
        outcome = part.get("outcome") or {}
        code = outcome.get("exit_code", outcome.get("type"))
        texts.append(f"{part.get('stdout') or ''}{part.get('stderr') or ''}\n(exit code {code})")
    return "\n".join(texts)


def call_item(
    form: ToolForm | None, call_id: str, name: str, arguments: str, item_id: str, status: str = "completed"
) -> dict[str, Any]:
    """A call as the agent gets it."""
    head = {"id": item_id, "call_id": call_id, "status": status}
    if form is None or form.kind == "function":
        more = {} if form is None else {"namespace": form.namespace}
        name = name if form is None else form.name
        return {**head, "type": "function_call", "name": name, "arguments": arguments, **more}
    head["type"] = _ITEMS[form.kind]
    try:
        read = value_of(arguments)
    except NOT_JSON:
        read = None
    if form.kind == "custom":
        text = read.get("input") if isinstance(read, dict) else None
        more = {} if form.namespace is None else {"namespace": form.namespace}
        return {**head, "name": form.name, "input": text if isinstance(text, str) else arguments, **more}
    action = read if isinstance(read, dict) else {}
    if form.kind == "local_shell":
        action = {"type": "exec", "command": [], "env": {}, **action}
    elif form.kind == "shell":
        action = {"commands": [], **action}
    return {**head, _MEMBER[form.kind]: action}
