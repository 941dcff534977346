"""Replies as streams: a whole reply as deltas, deltas as the blocks of an answer, and server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from ..errors import RequestError
from .canonical import STOP, TOOL_CALLS, Delta, ModelRequest, Reply, ToolCall, ToolDelta, Usage


def deltas_of(reply: Reply) -> list[Delta]:
    """Split a complete reply into the deltas of a stream, for engines that answer in one piece."""
    deltas: list[Delta] = []
    for choice in reply.choices:
        if choice.reasoning:
            deltas.append(Delta(choice=choice.index, reasoning=choice.reasoning))
        if choice.content or choice.logprob_entries:  # tokens of calls and of thinking have logprobs too
            deltas.append(Delta(choice=choice.index, text=choice.content, logprob_entries=choice.logprob_entries))
        for i, call in enumerate(choice.tool_calls):
            piece = ToolDelta(index=i, id=call.id, name=call.name, arguments=call.arguments)
            deltas.append(Delta(choice=choice.index, tool_calls=[piece]))
        deltas.append(
            Delta(choice=choice.index, finish_reason=choice.finish_reason, stop_sequence=choice.stop_sequence)
        )
    if reply.usage is not None:
        deltas.append(Delta(usage=reply.usage))
    return deltas


class CollectedCalls:
    """Tool calls of a stream, for dialects that write one call at a time: each is written when the reply is over.

    An engine may write pieces of parallel calls in turns, and only the end of the reply tells that a call is whole.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[ToolDelta]] = {}

    def add(self, pieces: Iterable[ToolDelta]) -> None:
        for piece in pieces:
            self._pieces.setdefault(piece.index, []).append(piece)

    def all(self) -> list[ToolCall]:
        """Return the calls in order, each with the first id and name from the engine, or empty ones."""
        return [
            ToolCall(
                id=next((p.id for p in pieces if p.id), ""),
                name=next((p.name for p in pieces if p.name), ""),
                arguments="".join(p.arguments for p in pieces),
            )
            for _, pieces in sorted(self._pieces.items())
        ]


class StreamEncoder(Protocol):
    """Deltas -> the bytes of a stream: ``start``, ``feed`` per delta, then ``finish`` or ``error``.

    In between, ``ping`` shows that there is more to come.
    """

    def start(self) -> bytes: ...
    def feed(self, delta: Delta) -> bytes: ...
    def ping(self) -> bytes: ...
    def finish(self) -> bytes: ...
    def error(self, error: RequestError) -> bytes: ...


class BlockEncoder(ABC):
    """An encoder for dialects with one choice, whose answer is a row of blocks, written one after the other.

    A delta of another kind than the open block closes it and opens the next. Calls come whole, at the end. A dialect writes
    the events: `start`, `opened`, `piece`, `closed`, `call`, and `ended`. After `finish`, ``body`` is the whole answer.
    """

    body: dict[str, Any]

    def __init__(self, request: ModelRequest, *, reply_id: str, model: str = "", created: int = 0) -> None:
        self.request, self.reply_id = request, reply_id
        self.model, self.created = model or request.model, created
        self.content: list[dict[str, Any]] = []  # the blocks of the answer
        self.kind: str | None = None  # kind of the open block: reasoning or text
        self._pieces: list[str] = []
        self.usage = request.counted or Usage()
        self.finish_reason: str | None = None
        self.stop_sequence: str | None = None
        self._calls = CollectedCalls()

    def feed(self, delta: Delta) -> bytes:
        if delta.usage is not None:
            self.usage = delta.usage
        if delta.choice:
            return b""
        out = b""
        entries = (delta.logprob_entries or []) if self.request.logprobs else []
        thought = delta.reasoning if self.request.include_thinking else ""
        for kind, text in (("reasoning", thought), ("text", delta.text)):
            # A token may have no text, such as the last token of a reply; it belongs to the text that is being written.
            more = entries if kind == "text" and (text or self.kind == kind) else []
            if text or more:
                out += self._write(kind, text, more)
        self._calls.add(delta.tool_calls)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_sequence = delta.finish_reason, delta.stop_sequence
        return out

    def _write(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        out = b""
        if self.kind != kind:
            out = self._close() + self.opened(kind)
            self.kind, self._pieces = kind, []
        self._pieces.append(text)
        return out + self.piece(kind, text, entries)

    def _close(self, *, last: bool = False) -> bytes:
        kind, self.kind = self.kind, None
        return b"" if kind is None else self.closed(kind, "".join(self._pieces), last=last)

    def finish(self) -> bytes:
        calls = self._calls.all()
        if calls and self.finish_reason == STOP:  # OpenAI's and vLLM's reason for a call of a named tool
            self.finish_reason = TOOL_CALLS
        out = b"" if calls or self.content else self._write("text", "", [])  # agents read the first block
        out += self._close(last=not calls)
        for place, call in enumerate(calls):
            out += self.call(call, place, last=call is calls[-1])
        return out + self.ended()

    @abstractmethod
    def start(self) -> bytes: ...

    @abstractmethod
    def opened(self, kind: str) -> bytes: ...

    @abstractmethod
    def piece(self, kind: str, text: str, entries: list[dict[str, Any]]) -> bytes:
        """Encode a piece of the open block, with its logprobs."""

    @abstractmethod
    def closed(self, kind: str, text: str, *, last: bool) -> bytes:
        """Encode the end of a block. With ``last``, the answer ends with it."""

    @abstractmethod
    def call(self, call: ToolCall, place: int, *, last: bool) -> bytes: ...

    @abstractmethod
    def ended(self) -> bytes: ...


def encode_event(data: Any, name: str = "") -> bytes:
    """Return an event as bytes. ``data`` becomes JSON, so it has no line ends in it.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
