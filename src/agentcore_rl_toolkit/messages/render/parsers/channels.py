"""Replies of gpt-oss and Muse Glimmer: a sequence of messages, each with a header that has its channel or recipient.

Theory of operation. A message is ``HEADER<|message|>BODY`` and an end mark. The prompt ends inside the first header. A family
describes its headers in a `Channels`. The parser gives out a call when its message has ended, and other text as it comes. A model
may write text in place of a header. That text is the answer if no message follows, and reasoning otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...wire.canonical import Delta
from .base import Call, Grammar, Held, OutputParser, Schemas, any_of, held_back, schemas_of

_START, _MESSAGE = "<|start|>", "<|message|>"

Kind = Literal["call", "reasoning", "text"]


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The form of a family's headers.

    ``ends`` are the marks that end a message. ``kind`` reads a header, with or without tools on offer. ``calls`` reads the header
    and body of a call; None: it is not understood. ``noise`` finds the markup of a header, which is left out of text that stands
    in place of one. ``header`` finds a header, or the beginning of one, at the end of a body without an end mark.
    """

    ends: tuple[str, ...]
    kind: Callable[[str, bool], Kind]
    calls: Callable[[str, str, Schemas], list[Call] | None]
    noise: re.Pattern[str]
    header: re.Pattern[str] | None = None


class ChannelParser(OutputParser):
    """Read a reply that consists of messages."""

    def __init__(
        self,
        grammar: Grammar,
        *,
        channels: Channels,
        tools: Sequence[dict[str, Any]] | None = None,
        reasoning_open: bool = False,
    ) -> None:
        super().__init__()
        self._grammar = grammar
        self._channels = channels
        self._schemas = schemas_of(tools)
        self._tools = bool(tools)
        self._held = Held()
        self._header: str | None = None  # header of the message whose body is being read; None while reading a header
        self._kind: Kind = "text"
        self._stray = ""

    def feed(self, text: str) -> list[Delta]:
        found = self._held.add(text, self._marks())
        streams = self._header is not None and self._kind != "call"
        return self._run(final=False) if found or streams else []

    def finish(self) -> list[Delta]:
        deltas = self._run(final=True)
        rest = self._held.take()
        if self._header is not None and self._kind == "call" and not rest.strip():
            deltas += self._unread(rest)  # cut before its arguments: a call without any has {}
        elif self._header is not None:
            deltas += self._body(rest, closed=True)
        else:
            self._stray += rest
            said = self._channels.noise.sub("", self._stray).strip()
            if self._tools and self._channels.kind(rest, True) == "call":
                self._bad = True
                deltas += self._say(self._stray)
            elif said:
                deltas += self._say(said)
        self._header = None
        self._bad = self._bad or (self._tools and self._grammar.hinted("".join(self._plain)))
        return deltas

    def _marks(self) -> tuple[str, ...]:
        bare = self._header is None or self._channels.header is not None
        return (*((_MESSAGE,) if bare else ()), *self._channels.ends)

    def _run(self, *, final: bool) -> list[Delta]:
        text, at = self._held.take(), 0  # `at`: where the part that is not read begins
        deltas: list[Delta] = []
        while (pattern := any_of(self._marks())) and (found := pattern.search(text, at)):
            before, at = text[at : found.start()], found.end()
            if found[0] != _MESSAGE:
                deltas += self._end(before)
                continue
            header = before
            if self._header is not None:  # the last body had no end mark
                bare = self._channels.header.search(before) if self._channels.header is not None else None
                header = "" if bare is None else bare[0]
                deltas += self._end(before.removesuffix(header))
            deltas += self._begin(header)
        if self._header is not None and self._kind != "call":
            size = len(text) if final else self._sure(text, at)
            deltas += self._body(text[at:size], closed=False)
            at = size
        self._held.add(text[at:], self._marks())
        return deltas

    def _sure(self, text: str, at: int) -> int:
        """Return the end of the text that belongs to the open body, whatever comes next."""
        size = len(text) - held_back(text[at:], self._marks())
        bare = self._channels.header.search(text, at, size) if self._channels.header is not None else None
        return size if bare is None else bare.start()

    def _begin(self, header: str) -> list[Delta]:
        self._header, self._kind = header, self._channels.kind(header, self._tools)
        said, self._stray = self._channels.noise.sub("", self._stray).strip(), ""
        return [Delta(reasoning=f"{said}\n")] if said else []

    def _end(self, before: str) -> list[Delta]:
        if self._header is None:
            self._stray += before
            return []
        deltas = self._body(before, closed=True)
        self._header = None
        return deltas

    def _body(self, text: str, *, closed: bool) -> list[Delta]:
        if self._kind == "call":
            calls = self._channels.calls(self._header or "", text, self._schemas) if closed else []
            return self._unread(text) if calls is None else [self._emit(call) for call in calls]
        if self._kind != "reasoning":
            return self._say(text)
        return [Delta(reasoning=text)] if text else []

    def _unread(self, body: str) -> list[Delta]:
        self._bad = True
        return self._say(f"{self._header}{_MESSAGE}{body}")
