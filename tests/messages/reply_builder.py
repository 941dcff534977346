"""Deltas of one streamed answer -> the whole reply."""

from __future__ import annotations

from typing import Any

from agentcore_rl_toolkit.messages.wire.canonical import Choice, Delta, Reply, ToolCall, Usage, new_id


class Read(Reply, kw_only=True):
    """A reply that was read. ``complete`` is False when it ended too early, ``error`` is what the server sent inside it."""

    complete: bool = True
    error: dict[str, Any] | None = None


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

    def reply(self) -> Read:
        """The answer as far as it has come; calling it again after more deltas is fine."""
        choices = [self._close(growing) for _, growing in sorted(self._open.items())]
        return Read(
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
