"""Deltas of one streamed answer -> the whole reply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .canonical import Choice, Delta, Reply, ToolCall, ToolDelta, Usage, new_id


class _Open:
    """A choice that is still growing."""

    __slots__ = ("calls", "choice", "entries", "reasoning", "refusal", "text")

    def __init__(self, index: int) -> None:
        self.choice = Choice(index=index)
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.refusal: list[str] = []
        self.calls: dict[int, tuple[list[str], list[str], list[str]]] = {}  # index -> ids, names, argument pieces
        self.entries: list[dict[str, Any]] | None = None


class ReplyBuilder:
    """Collects deltas by choice; pieces of a tool call are joined by its index.

    The reply is complete only if every choice said why it finished.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self.id = ""
        self.model = ""
        self.created = 0
        self.usage: Usage | None = None
        self.error: dict[str, Any] | None = None

    def choice(self, index: int) -> _Open:
        found = self._open.get(index)
        if found is None:
            found = self._open[index] = _Open(index)
        return found

    def add(self, delta: Delta) -> None:
        if delta.usage is not None:
            self.usage = delta.usage
            if delta.choice not in self._open and delta == Delta(choice=delta.choice, usage=delta.usage):
                return  # usage belongs to the whole reply; it does not open a choice
        growing = self.choice(delta.choice)
        if delta.text:
            growing.text.append(delta.text)
        if delta.reasoning:
            growing.reasoning.append(delta.reasoning)
        if delta.refusal:
            growing.refusal.append(delta.refusal)
        for piece in delta.tool_calls:
            ids, names, arguments = growing.calls.setdefault(piece.index, ([], [], []))
            if piece.id and not ids:
                ids.append(piece.id)
            if piece.name:
                names.append(piece.name)
            if piece.arguments:
                arguments.append(piece.arguments)
        if delta.logprob_entries is not None:
            growing.entries = (growing.entries or []) + delta.logprob_entries
        if delta.finish_reason is not None:
            growing.choice.finish_reason = delta.finish_reason
        if delta.stop_sequence is not None:
            growing.choice.stop_sequence = delta.stop_sequence

    @property
    def complete(self) -> bool:
        """Whether every choice has said why it finished, and there was no error."""
        choices = self._open.values()
        return self.error is None and bool(choices) and all(o.choice.finish_reason is not None for o in choices)

    def reply(self) -> Reply:
        """The answer as far as it has come; calling it again after more deltas is fine."""
        choices = [self._close(growing) for _, growing in sorted(self._open.items())]
        return Reply(
            id=self.id or new_id("chatcmpl-"),
            model=self.model,
            created=self.created,
            choices=choices,
            usage=self.usage,
            complete=self.complete,
            error=self.error,
        )

    @staticmethod
    def _close(growing: _Open) -> Choice:
        choice = growing.choice
        choice.content = "".join(growing.text)
        choice.reasoning = "".join(growing.reasoning)
        choice.refusal = "".join(growing.refusal) or None
        choice.tool_calls = [
            ToolCall(id=ids[0] if ids else "", name="".join(names), arguments="".join(arguments))
            for _, (ids, names, arguments) in sorted(growing.calls.items())
        ]
        if choice.tool_calls and choice.parse_status == "none":
            choice.parse_status = "parsed"
        choice.logprob_entries = growing.entries
        return choice


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
