"""DeepSeek V3.2 and V4: calls in DSML, which says of every value whether it is a string.

Source: ``encoding/encoding_dsv32.py`` of deepseek-ai/DeepSeek-V3.2, which writes and reads the format (there is no chat
template); V4 differs in the outer mark. An object in JSON instead of parameters is what SGLang and SMG read as well.
"""

from __future__ import annotations

import re
from typing import Any

from ...wire.arguments import loads
from .base import Call, Grammar, Schemas, in_value
from .families import named_call, typed_value

_OPEN, _CLOSE = "<｜DSML｜parameter", "</｜DSML｜parameter>"
_NAME = re.compile(r'\s+name="([^"]+)"\s*>')
# A closing mark counts where one can stand: values may hold the same words.
_PARAMETER = re.compile(
    rf'\s*{_OPEN}\s+name="([^"]*)"\s+string="(true|false)"\s*>(.*?){_CLOSE}(?=\s*(?:{_OPEN}|\Z))', re.DOTALL
)


def _block(inner: str, schemas: Schemas) -> list[Call] | None:
    head = _NAME.match(inner)
    if head is None:
        return None
    body = inner[head.end() :]
    if _OPEN not in body:
        return named_call(head[1], body) if body.strip()[:1] in ("", "{") else None
    types = schemas.get(head[1], {})
    arguments: dict[str, Any] = {}
    at = 0
    while (match := _PARAMETER.match(body, at)) is not None:
        key, is_string, value = match.groups()
        # A parameter that opens inside another's value: the mark that closes that one was misspelt or left out.
        if key in arguments or _OPEN in value:
            return None
        arguments[key] = value if is_string == "true" else _value(value, types.get(key))
        at = match.end()
    return None if body[at:].strip() else named_call(head[1], arguments)


def _value(text: str, schema: Any) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return typed_value(text, schema)


DSML = Grammar(
    name="dsml",
    signs=(("｜DSML｜",),),
    blocks=(("<｜DSML｜invoke", "</｜DSML｜invoke>"),),
    parse_block=_block,
    skip=tuple(f"{slash}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for slash in ("<", "</")),
    hints=("<｜DSML｜", "</｜DSML｜"),
    inside=in_value(_OPEN, _CLOSE),
)
