"""Arguments of tool calls: JSON text as models write it, which JSON does not always allow.

Python's reader and writer know ``NaN``, ``Infinity`` and ``-Infinity``, and read ``1e999`` as infinite. Models write what they
have seen, vLLM and SGLang pass it on, and JSON has no such numbers (RFC 8259, 6): one of them in a body makes all of the body
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
_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)  # what is inside of one, up to its quote or half of an escape
_BARE = re.compile(r"[A-Za-z0-9+\-.]+")
_BETWEEN = re.compile(r'[^"A-Za-z0-9+\-.]+')
_LONGEST = 400  # characters of a number that are waited for


class StandardNumbers:
    """JSON text in any slices -> the same with a string for each number that JSON does not have."""

    def __init__(self) -> None:
        self._inside = False
        self._held = ""  # a number that may go on, or a backslash

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        out: list[str] = []
        at = 0
        while at < len(text):
            if self._inside:
                end = _STRING.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing as well
                out.append(text[at:end])
                self._inside = text[end : end + 1] != '"'
                if self._inside:
                    self._held = text[end:]
                    break
                out.append('"')
                at = end + 1
            elif text[at] == '"':
                out.append('"')
                self._inside = True
                at += 1
            else:
                bare = _BARE.match(text, at)
                if bare is not None and bare.end() == len(text) and len(bare[0]) < _LONGEST:
                    self._held = bare[0]
                    break
                found = bare or _BETWEEN.match(text, at)
                assert found is not None  # a character is in one of the two, or a quote
                out.append(found[0] if bare is None else _as_json(bare[0]))
                at = found.end()
        return "".join(out)

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held if self._inside else _as_json(held)


def _as_json(bare: str) -> str:
    if bare in _NAMES:
        return f'"{bare}"'
    if "e" in bare.lower():
        try:
            if math.isinf(float(bare)):
                return '"-Infinity"' if bare[0] == "-" else '"Infinity"'
        except ValueError:
            pass
    return bare


def standard(text: str) -> str:
    """The same text, with a string for each number that JSON does not have."""
    numbers = StandardNumbers()
    return numbers.feed(text) + numbers.finish()


def value_of(arguments: str) -> Any:
    """What a call's arguments say; nothing is no arguments. Raises: one of NOT_JSON."""
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments)
    except NOT_JSON:
        text = standard(arguments)
        if text == arguments:
            raise
        return msgspec.json.decode(text)
