"""Llama 3.x: the whole answer is the call, as JSON or as Python.

Source: the chat templates of meta-llama/Llama-3.1, 3.2 and 4: ``{"name": ..., "parameters": {...}}``, several
separated by semicolons, or ``[name(key=value), ...]``; either may follow ``<|python_tag|>``. An answer that does not
begin like a call is text and is given out as it comes. Any other answer is held until its end, because only all of it
shows if it is a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...wire.canonical import Delta
from .base import Call, CallTag, Grammar, OutputParser, Schemas, schemas_of
from .families import call_from_json, dumps, typed_value
from .pythonic import python_calls

_TAG = "<|python_tag|>"


class LlamaParser(OutputParser):
    """Reads an answer of Llama 3.x: text, or one or more calls."""

    def __init__(
        self, grammar: Grammar, *, tools: Sequence[dict[str, Any]] | None = None, reasoning_open: bool = False
    ) -> None:
        super().__init__()
        self._grammar = grammar
        self._tools = schemas_of(tools)
        self._held: list[str] | None = [] if tools else None  # None: it is text
        self._start = ""  # beginning of the held text, without blanks

    def feed(self, text: str) -> list[Delta]:
        if self._held is None:
            return self._say(text)
        self._held.append(text)
        if len(self._start) < len(_TAG):
            self._start = (self._start + text[: len(text) - len(text.lstrip()) + len(_TAG)]).lstrip()[: len(_TAG)]
        if not self._start or self._start[0] in "{[" or _TAG.startswith(self._start):
            return []
        return self._release()

    def finish(self) -> list[Delta]:
        if not self._held:
            # It began as text: a call in it, or one without its brackets, was meant and is none.
            self._bad = bool(self._tools) and self._meant("".join(self._plain))
            return []
        text = "".join(self._held).strip()
        tagged = text.startswith(_TAG)
        body = text.removeprefix(_TAG).strip()
        calls = _json_calls(body) or _python_calls(body, self._tools)
        known = calls and all(call.name in self._tools for call in calls)
        if not calls or (not tagged and not known):
            # JSON or a list may well be the answer; it was meant as a call if it is built like one.
            self._bad = tagged or bool(calls) or self._meant(body)
            return self._release()
        self._held = None
        return [self._emit(call) for call in calls]

    def _meant(self, text: str) -> bool:
        in_json = '"parameters"' in text and any(f'"{name}"' in text for name in self._tools)
        called = text.lstrip("[ \n").startswith(tuple(f"{name}(" for name in self._tools))
        return in_json or called or self._grammar.hinted(text)

    def _release(self) -> list[Delta]:
        text, self._held = "".join(self._held or ()), None
        return self._say(text)


def _json_calls(body: str) -> list[Call] | None:
    if not body.startswith(("{", "[{")):
        return None
    decoder = json.JSONDecoder(strict=False)
    calls: list[Call] = []
    at, end = (1, len(body) - 1) if body.startswith("[") and body.endswith("]") else (0, len(body))
    while at < end:
        try:
            _, stop = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return None
        call = call_from_json(body[at:stop])
        if call is None:
            return None
        calls.append(call)
        at = stop
        while at < end and body[at] in "; ,\r\n\t":
            at += 1
    return calls or None


def _python_calls(body: str, tools: Schemas) -> list[Call] | None:
    calls = []
    for name, found in python_calls(body) or ():
        types = tools.get(name, {})
        calls.append(Call(name, dumps({key: _value(value, types.get(key)) for key, value in found.items()})))
    return calls or None


def _value(value: Any, schema: Any) -> Any:
    """Convert a value by its schema: Llama 4's template shows the model every value in quotes."""
    return typed_value(value, schema) if isinstance(value, str) and schema is not None else value


LLAMA = Grammar(
    name="llama",
    signs=((_TAG,), ("ipython",)),
    parser=LlamaParser,
    reasoning=None,
    tag=CallTag('{"name": "%s", "parameters": ', "}", trigger="", between="; "),
    hints=(_TAG,),
    hint_pairs=(('{"name"', '"parameters"'),),
)
