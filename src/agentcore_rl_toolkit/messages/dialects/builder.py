"""Whole replies as the deltas of a stream, tool calls of a stream in order, and server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Iterable

from .canonical import Delta, Reply, ToolDelta


def deltas_of(reply: Reply) -> list[Delta]:
    """A whole reply as the deltas that a stream of it would have brought: for engines that answer in one piece."""
    deltas: list[Delta] = []
    for choice in reply.choices:
        if choice.reasoning:
            deltas.append(Delta(choice=choice.index, reasoning=choice.reasoning))
        if choice.content or choice.logprob_entries:  # tokens of calls and of thinking have logprobs too
            deltas.append(Delta(choice=choice.index, text=choice.content, logprob_entries=choice.logprob_entries))
        if choice.refusal:
            deltas.append(Delta(choice=choice.index, refusal=choice.refusal))
        for i, call in enumerate(choice.tool_calls):
            piece = ToolDelta(index=i, id=call.id, name=call.name, arguments=call.arguments)
            deltas.append(Delta(choice=choice.index, tool_calls=[piece]))
        deltas.append(
            Delta(choice=choice.index, finish_reason=choice.finish_reason, stop_sequence=choice.stop_sequence)
        )
    if reply.usage is not None:
        deltas.append(Delta(usage=reply.usage))
    return deltas


class CallsInOrder:
    """Tool calls of a stream one after the other, for dialects that write one at a time.

    An engine may write pieces of parallel calls in turns. Then the first call is streamed, and the others wait until it is
    whole, which only the end of the reply tells.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._waiting: dict[int, list[ToolDelta]] = {}

    def now(self, pieces: Iterable[ToolDelta]) -> list[ToolDelta]:
        """Those of the first call."""
        ready = []
        for piece in pieces:
            if self._first is None:
                self._first = piece.index
            if piece.index == self._first:
                ready.append(piece)
            else:
                self._waiting.setdefault(piece.index, []).append(piece)
        return ready

    def rest(self) -> list[list[ToolDelta]]:
        """The pieces of each further call, when the reply is over."""
        waiting, self._waiting = self._waiting, {}
        return [pieces for _, pieces in sorted(waiting.items())]


def encode_event(data: bytes, name: str = "") -> bytes:
    """One event as bytes. ``data`` is JSON, so it has no line ends in it.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """
    if name:
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"
