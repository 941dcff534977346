"""gpt-oss: the harmony format, in which an answer is a row of messages on channels.

Source: github.com/openai/harmony. ``<|channel|>NAME [to=functions.TOOL] [<|constrain|>json]<|message|>BODY`` and then
``<|end|>`` and ``<|start|>assistant`` before the next one. The prompt ends with ``<|start|>assistant``. Channel
"analysis" is reasoning, "final" is the answer, "commentary" is a call when it has a recipient and a preamble for the
user when it has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...dialects.canonical import Delta
from .base import Call, Grammar, OutputParser, first_of, held_back
from .families import object_text

HARMONY = Grammar(name="harmony", blocks=(), parse_block=lambda _inner, _schemas: None, reasoning=None)

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_TO = re.compile(r"\bto=(\S+?)(?=\s|<|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(OutputParser):
    """Reads an answer in the harmony format."""

    def __init__(self, *, tools: Sequence[dict[str, Any]] | None = None) -> None:
        super().__init__()
        self._tools = bool(tools)
        self._buffer = ""
        self._header: str | None = None  # of the message whose body is being read; None while reading a header
        self._kind = ""

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        deltas = self._run(final=True)
        if self._header is not None and self._kind == "call" and not self._buffer.strip():
            self._bad = True  # cut before its arguments; one without any says {}
            deltas.append(Delta(text=f"{self._header}<|message|>{self._buffer}"))
        elif self._header is not None:
            deltas += self._body(self._buffer, closed=True)
        elif self._buffer.strip() and "<|" not in self._buffer:
            # No header at all: a model that forgot the format wrote plain text.
            deltas.append(Delta(text=self._buffer))
        elif "to=functions" in self._buffer:
            self._bad = True
            deltas.append(Delta(text=self._buffer))
        self._buffer = ""
        self._header = None
        return deltas

    def _run(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            if self._header is None:
                at = self._buffer.find("<|message|>")
                if at < 0:
                    return deltas
                self._header = self._buffer[:at]
                self._buffer = self._buffer[at + len("<|message|>") :]
                self._kind = self._classify(self._header)
            found = first_of(self._buffer, _ENDS)
            if found is None:
                if self._kind != "call":
                    keep = 0 if final else held_back(self._buffer, _ENDS)
                    ready = self._buffer[: len(self._buffer) - keep]
                    self._buffer = self._buffer[len(ready) :]
                    deltas += self._body(ready, closed=False)
                return deltas
            at, marker = found
            body, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            deltas += self._body(body, closed=True)
            self._header = None

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
