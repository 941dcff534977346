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

OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def functions(tool: Any, path: str, forms: dict[str, ToolForm]) -> list[dict[str, Any]]:
    """The functions that stand for a tool, none for a hosted one; ``forms`` learns their names. Raises: RequestError."""
    if not isinstance(tool, dict):
        raise RequestError(f"{path} must be an object", param=path)
    kind = tool.get("type")
    if kind not in ("function", "custom", "namespace"):
        return []
    name = text_member(tool, "name", path)
    if kind == "namespace":
        return _flattened(tool, name, path, forms)
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    if kind == "custom":
        forms[name] = ToolForm(kind, name)
        shape, described = tool.get("format") or {}, str(tool.get("description") or "")
        if shape.get("definition"):
            described += f"\n\nThe input follows this grammar ({shape.get('syntax')}):\n{shape['definition']}"
        function = {"name": name, "description": described, "parameters": _INPUT}
    return [{"type": "function", "function": function}]


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
    if kind not in ("function_call", "custom_tool_call"):
        return None
    name = flat_name(item.get("namespace"), text_member(item, "name", path))
    if kind == "custom_tool_call":
        return name, json.dumps({"input": text_member(item, "input", path)}, ensure_ascii=False)
    return name, text_member(item, "arguments", path) or "{}"


def call_item(
    form: ToolForm | None, call_id: str, name: str, arguments: str, item_id: str, status: str = "completed"
) -> dict[str, Any]:
    """A call as the agent gets it."""
    head = {"id": item_id, "call_id": call_id, "status": status, "name": name if form is None else form.name}
    more = {} if form is None or form.namespace is None else {"namespace": form.namespace}
    if form is None or form.kind == "function":
        return {**head, "type": "function_call", "arguments": arguments, **more}
    try:
        read = value_of(arguments)
    except NOT_JSON:
        read = None
    text = read.get("input") if isinstance(read, dict) else None
    return {**head, "type": "custom_tool_call", "input": text if isinstance(text, str) else arguments, **more}
