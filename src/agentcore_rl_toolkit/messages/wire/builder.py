"""Turns whole replies into the deltas of a stream, joins a stream's tool calls, and writes server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

from .canonical import Delta, Reply, ToolCall, ToolDelta


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
        """The calls in their order, with the first id and name that the engine gave each, else an empty one."""
        return [
            ToolCall(
                id=next((p.id for p in pieces if p.id), ""),
                name=next((p.name for p in pieces if p.name), ""),
                arguments="".join(p.arguments for p in pieces),
            )
            for _, pieces in sorted(self._pieces.items())
        ]


def encode_event(data: bytes, name: str = "") -> bytes:
    """One event as bytes. ``data`` is JSON, so it has no line ends in it.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
    """
    if name:
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"
