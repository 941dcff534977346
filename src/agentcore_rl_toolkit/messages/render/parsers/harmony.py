"""gpt-oss: the harmony format, in which an answer is a row of messages on channels.

Source: github.com/openai/harmony. ``<|channel|>NAME [to=functions.TOOL] [<|constrain|>json]<|message|>BODY`` and then
``<|end|>`` and ``<|start|>assistant`` before the next one. The prompt ends with ``<|start|>assistant``. Channel
"analysis" is reasoning, "final" is the answer, "commentary" is a call when it has a recipient and a preamble for the
user when it has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...wire.canonical import Delta
from .base import Call, Grammar, Held, OutputParser, any_of, held_back
from .families import object_text

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE = ("<|message|>",)
_TO = re.compile(r"\bto=(\S+?)(?=\s|<|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(OutputParser):
    """Reads an answer in the harmony format."""

    def __init__(
        self, _: Grammar, *, tools: Sequence[dict[str, Any]] | None = None, reasoning_open: bool = False
    ) -> None:
        super().__init__()
        self._tools = bool(tools)
        self._held = Held()
        self._header: str | None = None  # of the message whose body is being read; None while reading a header
        self._kind = ""

    def feed(self, text: str) -> list[Delta]:
        found = self._held.add(text, self._marks())
        streams = self._header is not None and self._kind != "call"
        return self._run(final=False) if found or streams else []

    def finish(self) -> list[Delta]:
        deltas = self._run(final=True)
        rest = self._held.take()
        if self._header is not None and self._kind == "call" and not rest.strip():
            self._bad = True  # cut before its arguments; one without any says {}
            deltas.append(Delta(text=f"{self._header}<|message|>{rest}"))
        elif self._header is not None:
            deltas += self._body(rest, closed=True)
        elif rest.strip() and "<|" not in rest:
            # No header at all: a model that forgot the format wrote plain text.
            deltas.append(Delta(text=rest))
        elif "to=functions" in rest:
            self._bad = True
            deltas.append(Delta(text=rest))
        self._header = None
        return deltas

    def _marks(self) -> tuple[str, ...]:
        return _MESSAGE if self._header is None else _ENDS

    def _run(self, *, final: bool) -> list[Delta]:
        text, at = self._held.take(), 0  # `at`: where the part that is not read begins
        deltas: list[Delta] = []
        while (pattern := any_of(self._marks())) and (found := pattern.search(text, at)):
            before, at = text[at : found.start()], found.end()
            if self._header is None:
                self._header, self._kind = before, self._classify(before)
            else:
                deltas += self._body(before, closed=True)
                self._header = None
        if self._header is not None and self._kind != "call":
            size = len(text) - (0 if final else held_back(text[at:], _ENDS))
            deltas += self._body(text[at:size], closed=False)
            at = size
        self._held.add(text[at:], self._marks())
        return deltas

    def _classify(self, header: str) -> str:
        if _TO.search(header) and self._tools:
            return "call"
        channel = _CHANNEL.search(header)
        return "reasoning" if channel is not None and channel.group(1) == "analysis" else "text"

    def _body(self, text: str, *, closed: bool) -> list[Delta]:
        if self._kind == "call":
            return self._call(text) if closed else []
        if not text:
            return []
        return [Delta(reasoning=text)] if self._kind == "reasoning" else [Delta(text=text)]

    def _call(self, body: str) -> list[Delta]:
        header = self._header or ""
        recipient = _TO.search(header)
        name = recipient.group(1) if recipient else ""
        arguments = object_text(body)
        if arguments is None or not name.startswith("functions.") or len(name) == len("functions."):
            self._bad = True
            return [Delta(text=f"{header}<|message|>{body}")]
        return [self._emit(Call(name.removeprefix("functions."), arguments))]


HARMONY = Grammar(name="harmony", signs=(("<|channel|>", "<|message|>"),), parser=HarmonyParser, reasoning=None)
