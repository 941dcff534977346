"""The call formats of the model families that mark calls in the text: Hermes and Qwen, Qwen3-Coder, GLM, DeepSeek.

Each is a `Grammar`. Sources: the chat templates of NousResearch/Hermes-3, Qwen/Qwen2.5, Qwen/Qwen3, Qwen/Qwen3-Coder,
zai-org/GLM-4.5 and deepseek-ai/DeepSeek-V3 / V3.1 / R1, which show the model its own calls in these forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import NOT_JSON
from ...wire.arguments import loads, standard, value_of, without_halves
from .base import Call, CallTag, Grammar, Schemas


class _Json(msgspec.Struct):
    name: str
    # Not `Raw | None`: in a union Raw takes objects and lists only.
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


_CALL_DECODER = msgspec.json.Decoder(_Json)


def dumps(value: Any) -> str:
    """Encode as JSON text that any agent can read. Raises: RecursionError."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = without_halves(json.dumps(value))
    return standard(text)


def call_from_json(text: str) -> Call | None:
    """Read ``{"name": ..., "arguments": {...}}`` as a call. Arguments that are JSON keep the sampled characters."""
    try:
        found = _CALL_DECODER.decode(text)
    except NOT_JSON:
        return _lenient(text)
    arguments = object_text(bytes(found.arguments or found.parameters).decode())
    return Call(found.name, arguments) if found.name and arguments is not None else None


def _lenient(text: str) -> Call | None:
    """Read a call with raw line ends inside strings and numbers such as NaN. Other errors stay unparsed."""
    try:
        found = loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return Call(found["name"], dumps(arguments)) if isinstance(arguments, dict) else None


def object_text(text: str) -> str | None:
    """Return the text of a JSON object, which may be inside a JSON string. "null" and "" are an empty object."""
    text = text.strip()
    if text in ("", "null"):
        return "{}"
    try:
        found = value_of(text)
    except NOT_JSON:
        try:  # raw line ends inside strings are the most frequent mistake
            found = loads(text, strict=False)
        except (ValueError, RecursionError):
            return None
        text = dumps(found)
    if isinstance(found, str):
        return object_text(found) if found.strip().startswith("{") else None
    return without_halves(text) if isinstance(found, dict) else None


def named_call(name: str, arguments: str | dict[str, Any]) -> list[Call] | None:
    """Return the call of a tool, or None if the text is not a JSON object or no tool can have such a name."""
    found = object_text(arguments) if isinstance(arguments, str) else dumps(arguments)
    return [Call(name, found)] if found is not None and re.fullmatch(r"[^\s<>{}\"]+", name) else None


def _hermes_block(inner: str, _schemas: Schemas) -> list[Call] | None:
    call = call_from_json(inner.strip())
    return [call] if call is not None else None


_TYPES = {"integer", "number", "boolean", "object", "array", "null"}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # schemas are the agent's, and may be none


def types_of(schema: Any) -> set[str]:
    """Return the types that a schema names, or an empty set."""
    if not isinstance(schema, Mapping):
        return set()
    options = [option for name in ("anyOf", "oneOf") for option in _listed(schema.get(name))]
    named = [schema.get("type"), *(option.get("type") for option in options if isinstance(option, Mapping))]
    return {kind for each in named for kind in (each, *_listed(each)) if isinstance(kind, str)}


def typed_value(text: str, schema: Any) -> Any:
    """Convert a value written as bare text to the type in its schema. Without a useful type it stays a string."""
    wanted = types_of(schema)
    if wanted and not wanted & _TYPES:
        return text
    if not wanted and isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
        allowed = _listed(schema.get("enum")) or [schema.get("const")]
        return text if text in allowed else next((v for v in allowed if json.dumps(v) == text.strip()), text)
    try:
        value = loads(text.strip())
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if "boolean" in wanted and lowered in ("true", "false"):
            return lowered == "true"
        if "null" in wanted and lowered in ("none", "null"):
            return None
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in wanted and "number" not in wanted:
        return int(value)  # 3.0 is an integer to JSON Schema
    return value if not wanted or wanted & _KINDS[type(value)] else text


_KINDS: dict[type, set[str]] = {
    **{type(None): {"null"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}},
    **{str: {"string"}, list: {"array"}, dict: {"object"}},
}


# A closing tag counts where one can stand: values may hold the same words.
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>(?=\s*(?:<function=|</tool_call>|\Z))|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>(?=\s*(?:<parameter=|\Z))|(?=<parameter=)|\Z)", re.DOTALL
)


def _coder_block(text: str, schemas: Schemas) -> list[Call] | None:
    calls: list[Call] = []
    for match in _FUNCTION.finditer(text):
        name = match.group(1).strip()
        types = schemas.get(name, {})
        arguments = {}
        for key, value in _PARAMETER.findall(match.group(2)):
            # One line end belongs to the markup on either side; more are the value's own.
            value = value[1:] if value.startswith("\n") else value
            value = value[:-1] if value.endswith("\n") else value
            arguments[key.strip()] = typed_value(value, types.get(key.strip()))
        body = match.group(2)
        cut = body.rfind("<parameter=") > body.rfind("</parameter>")
        call = named_call(name, arguments)
        if call is None or cut or _PARAMETER.sub("", body).strip():
            return None
        calls += call
    if not calls or _FUNCTION.sub("", text).replace("<tool_call>", "").strip():
        return None
    return calls


# Atomic groups: a key or a value ends at its first mark, and nothing is tried again.
_GLM_PAIR = re.compile(r"\s*+<arg_key>(?>(.*?)</arg_key>)\s*+<arg_value>(?>(.*?)</arg_value>)", re.DOTALL)


def _glm_block(inner: str, schemas: Schemas) -> list[Call] | None:
    name, mark, rest = inner.partition("<arg_key>")
    name, pairs, at = name.strip(), mark + rest, 0
    types, arguments = schemas.get(name, {}), {}
    while (pair := _GLM_PAIR.match(pairs, at)) is not None:
        key = pair[1].strip()
        arguments[key] = typed_value(pair[2], types.get(key))
        at = pair.end()
    return None if pairs[at:].strip() else named_call(name, arguments)


def _deepseek_block(inner: str, _schemas: Schemas) -> list[Call] | None:
    """Read ``function<sep>NAME`` and arguments in a fenced block (V3 and R1), or ``NAME<sep>{...}`` (V3.1)."""
    head, mark, tail = inner.partition("<｜tool▁sep｜>")
    if not mark:
        return None
    if head.strip() == "function":
        name, _, body = tail.partition("\n")
        fenced = body.strip()
        if len(fenced) >= 6 and fenced.startswith("```") and fenced.endswith("```"):
            body = fenced[3:-3].removeprefix("json")
    else:
        name, body = head, tail
    return named_call(name.strip(), body)


HERMES = Grammar(
    name="hermes",
    signs=(("<tool_call>",),),
    tag=CallTag('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"),
    blocks=(("<tool_call>", "</tool_call>"),),
    parse_block=_hermes_block,
    hints=("<tool_call", "</tool_call>"),
    hint_pairs=(('{"name"', '"arguments"'),),
    whole=lambda _inner: True,  # it is JSON, or it is not
)
QWEN_CODER = Grammar(
    name="qwen_coder",
    signs=(("<function=",),),
    tag=CallTag(
        "<tool_call>\n<function=%s>\n",
        "\n</function>\n</tool_call>",
        trigger="<tool_call>",
        content="qwen_xml_parameter",
    ),
    blocks=(("<tool_call>", "</tool_call>"), ("<function=", "</function>")),
    parse_block=_coder_block,
    skip=("</tool_call>",),
    hints=("<tool_call", "<function=", "<parameter="),
    whole=lambda inner: inner.rstrip().endswith("</function>"),
    calls_end_reasoning=True,
)
GLM = Grammar(
    name="glm",
    signs=(("<arg_key>",),),
    blocks=(("<tool_call>", "</tool_call>"),),
    parse_block=_glm_block,
    hints=("<tool_call", "</tool_call>", "<arg_key>"),
    calls_end_reasoning=True,
)
DEEPSEEK = Grammar(
    name="deepseek",
    signs=(("<｜tool▁call▁begin｜>",),),
    blocks=(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
    parse_block=_deepseek_block,
    skip=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    hints=("<｜tool▁call", "<｜tool▁sep｜>", "<｜DSML｜"),  # the last is of V3.2 and V4, which are not read
    whole=lambda inner: inner.rstrip().endswith(("}", "```")),
)
PLAIN = Grammar(name="plain")
