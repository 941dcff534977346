"""Calls written as Python, ``[NAME(KEY=VALUE, ...), ...]``: Llama 4 and LFM2.5.

The templates write strings without escapes, and models imitate this. So a quote closes a string only if an argument can end
there. Line ends are part of a string, and ``true``, ``false`` and ``null`` are values too.

Source: the chat template of LiquidAI/LFM2.5-8B-A1B.
"""

from __future__ import annotations

import re
from typing import Any

from .base import Call, Grammar, Schemas
from .families import dumps

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(\s*")
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_ENDS = r"\s*(?:[,)\]}:]|\Z)"  # what follows a string
# Atomic groups: possessive quantifiers of groups are wrong in Python before 3.11.5.
_STRING = {q: re.compile(rf"{q}((?>(?:[^\\{q}]+|\\.|{q}(?!{_ENDS}))*)){q}", re.DOTALL) for q in "'\""}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"\w+")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_GAP = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {**dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)), "\\": "\\", "'": "'", '"': '"', "\n": ""}
_TWO_BLOCKS = re.compile(r"<\|tool_call_end\|>.*<\|tool_call_start\|>", re.DOTALL)
_PAIRS = {"[": "]", "(": ")", "{": "}"}


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        self._expect("[")
        found = [self._call()]
        while self._found(","):
            if self._peek() == "]":
                break
            found.append(self._call())
        self._expect("]")
        if self._peek():
            raise ValueError("text follows the calls")
        return found

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._match(_NAME)
        arguments: dict[str, Any] = {}
        while not self._found(")"):
            key = self._match(_KEY)[1]
            if key in arguments:
                raise ValueError("an argument is given twice")
            arguments[key] = self._value()
            if not self._found(",") and self._peek() != ")":
                raise ValueError("arguments are not separated")
        return name[1], arguments

    def _value(self) -> Any:
        first = self._peek()
        if first and first in "'\"":
            return _ESCAPE.sub(_unescaped, self._match(_STRING[first])[1])
        if first in ("[", "("):
            return self._items(first)
        if first == "{":
            pairs = self._items(first)
            return dict(pairs)
        if (number := _NUMBER.match(self.text, self.at)) is not None:
            self.at = number.end()
            plain = number[0].replace("_", "")
            return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
        return _WORDS[self._match(_WORD)[0]]

    def _items(self, opening: str) -> list[Any]:
        self._expect(opening)
        found = []
        while not self._found(_PAIRS[opening]):
            value = self._value()
            if opening == "{":
                self._expect(":")
                value = (value if isinstance(value, str) else dumps(value), self._value())
            found.append(value)
            if not self._found(",") and self._peek() != _PAIRS[opening]:
                raise ValueError("values are not separated")
        return found

    def _peek(self) -> str:
        self._match(_GAP)
        return self.text[self.at : self.at + 1]

    def _found(self, mark: str) -> bool:
        found = self._peek() == mark
        self.at += found
        return found

    def _expect(self, mark: str) -> None:
        if not self._found(mark):
            raise ValueError(f"{mark} is missing")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError("not a call")
        self.at = match.end()
        return match


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1 and code[0] in "xuU":
        return chr(int(code[1:], 16))
    return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPED.get(code, match[0])


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return names and arguments of the calls in ``[name(key=value)]``. None: the text is no such list."""
    try:
        return _Reader(text).calls()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _block(inner: str, _: Schemas) -> list[Call] | None:
    found = None if _TWO_BLOCKS.search(inner) else python_calls(inner)
    return [Call(name, dumps(arguments)) for name, arguments in found or ()] or None


LFM = Grammar(
    name="lfm",
    signs=(("<|tool_call_start|>",), ("<|im_start|>", '"List of tools: ["')),
    blocks=(("<|tool_call_start|>", "<|tool_call_end|>"),),
    parse_block=_block,
    hints=("<|tool_call_start|>", "<|tool_call_end|>"),
    whole=lambda _inner: True,  # the brackets close, or they do not
)
