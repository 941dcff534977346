"""Arguments of tool calls: models write JSON that is not always valid.

Python's reader and writer know ``NaN``, ``Infinity`` and ``-Infinity``, and read ``1e999`` as infinite. Models write such
numbers, vLLM and SGLang pass them on, and JSON does not have them (RFC 8259, 6): one of them in a body makes all of the body
unreadable to most clients. Dialects that carry arguments as text get the model's own. Where a dialect has an object, such a
number is a string with its name, as in protobuf's JSON (https://protobuf.dev/programming-guides/json); pydantic, for one,
takes that for a number.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from ..errors import NOT_JSON

_NAMES = frozenset({"NaN", "Infinity", "-Infinity"})
_STRING_OR_BARE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[A-Za-z0-9+\-.]+', re.DOTALL)


def _as_json(bare: str) -> str:
    if bare in _NAMES:
        return f'"{bare}"'
    if not bare.startswith('"') and "e" in bare.lower():
        try:
            if math.isinf(float(bare)):
                return '"-Infinity"' if bare[0] == "-" else '"Infinity"'
        except ValueError:
            pass
    return bare


def standard(text: str) -> str:
    """The same text, with a string for each number that JSON does not have."""
    return _STRING_OR_BARE.sub(lambda found: _as_json(found[0]), text)


def value_of(arguments: str) -> Any:
    """A call's arguments as an object; empty text is no arguments. Raises: one of NOT_JSON."""
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments)
    except NOT_JSON:
        text = standard(arguments)
        if text == arguments:
            raise
        return msgspec.json.decode(text)
