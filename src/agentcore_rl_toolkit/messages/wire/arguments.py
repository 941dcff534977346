"""Arguments of tool calls: models write JSON that is not always valid.

Python's reader and writer know ``NaN``, ``Infinity`` and ``-Infinity``, and read ``1e999`` as infinite. Models write such
numbers, vLLM and SGLang pass them on, and JSON does not have them (RFC 8259, 6): one of them in a body makes all of the body
unreadable to most clients. Dialects that carry arguments as text get the model's own. In a dialect with objects, such a
number is a string with its name, as in protobuf's JSON (https://protobuf.dev/programming-guides/json); pydantic, for one,
takes that for a number.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import msgspec

from ..errors import NOT_JSON
from .fields import replace_half_surrogates


def loads(text: str, *, strict: bool = True) -> Any:
    """Decode JSON as Python does, with strings for numbers that it does not have. Raises: ValueError, RecursionError."""
    value = json.loads(text, strict=strict, parse_constant=str, parse_float=_number)
    json.dumps(value)  # it is not deeper than what can be written
    return value


def _number(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else "-Infinity" if number < 0 else "Infinity"


def without_halves(text: str) -> str:
    """Replace each half surrogate in JSON with U+FFFD. Raises: UnicodeEncodeError if one is not escaped."""
    return replace_half_surrogates(text.encode())[0].decode()


def standard(text: str) -> str:
    """Replace such numbers in JSON with strings, and half surrogates with U+FFFD. Return text that is not JSON as it is."""
    try:
        msgspec.json.decode(text)
    except NOT_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            return msgspec.json.encode(loads(without_halves(text))).decode()
    return text


def value_of(arguments: str) -> Any:
    """Decode a call's arguments. Empty text means no arguments. Raises: one of NOT_JSON."""
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments)
    except NOT_JSON:
        text = standard(arguments)
        if text == arguments:
            raise
        return msgspec.json.decode(text)
