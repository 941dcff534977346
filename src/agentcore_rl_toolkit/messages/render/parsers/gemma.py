"""Gemma 4: ``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``, with strings between ``<|"|>`` marks.

Source: the chat template of google/gemma-4-31B-it. Numbers, booleans, lists and objects have no marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .base import Call, Grammar, Schemas
from .families import named_call, typed_value, types_of

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*(?:call)?:?\s*([^\s{}:]+)\s*(?=\{)")
_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|([^:,{}\[\]]*?))\s*:\s*', re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]]*")
_GAP = re.compile(r"[\s,]*")


def _value(text: str, at: int, schema: Any) -> tuple[Any, int]:
    """Return the value that begins at ``at``, and its end. Raises: ValueError."""
    schema = schema if isinstance(schema, Mapping) else {}
    if (string := _STRING.match(text, at)) is not None:
        # The marks say that it is a string, unless the schema takes none.
        types = types_of(schema)
        other = "string" not in types if types else "enum" in schema or "const" in schema
        return typed_value(string[1], schema) if other else string[1], string.end()
    if text.startswith("{", at):
        return _object(text, at, schema.get("properties"))
    if text.startswith("[", at):
        items, at = list[Any](), _end_of(_GAP, text, at + 1)
        while not text.startswith("]", at):
            item, at = _value(text, at, schema.get("items"))
            items.append(item)
            at = _end_of(_GAP, text, at)
        return items, at + 1
    end = _end_of(_BARE, text, at)
    bare = text[at:end].strip()
    if not bare or _QUOTE in bare:
        raise ValueError("no value")
    return (None if bare == "None" and not schema else typed_value(bare, schema or None)), end


def _object(text: str, at: int, types: Any) -> tuple[dict[str, Any], int]:
    types = types if isinstance(types, Mapping) else {}
    found, at = dict[str, Any](), _end_of(_GAP, text, at + 1)
    while not text.startswith("}", at):
        if (key := _KEY.match(text, at)) is None:
            raise ValueError("no key")
        name = key[2] if key[1] is None else key[1]
        found[name], at = _value(text, key.end(), types.get(name))
        at = _end_of(_GAP, text, at)
    return found, at + 1


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _block(inner: str, schemas: Schemas) -> list[Call] | None:
    head = _HEAD.match(inner)
    if head is None:
        return None
    try:
        arguments, at = _object(inner, head.end(), schemas.get(head[1]))
        return None if inner[at:].strip() else named_call(head[1], arguments)
    except (ValueError, RecursionError):
        return None


GEMMA = Grammar(
    name="gemma",
    signs=(("<|tool_call>call:",),),
    reasoning=("<|channel>", "<channel|>"),
    reasoning_head="thought\n",
    blocks=(("<|tool_call>", "<tool_call|>"),),
    parse_block=_block,
    hints=("<|tool_call>", "<tool_call|>"),
    whole=lambda _inner: True,  # the braces close, or they do not
    calls_end_reasoning=True,
)
