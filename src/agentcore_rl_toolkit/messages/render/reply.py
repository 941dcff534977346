"""Sampled ids -> text, reasoning and calls, whole or as they come."""

from __future__ import annotations

from collections.abc import Sequence

from ..wire.canonical import STOP, TOOL_CALLS, Choice, Delta, ParseStatus, ToolCall
from .parsers import OutputParser
from .parsers.base import held_back
from .tokens import TextDecoder, Tokenizer


class StopCutter:
    """Text in any slices -> the text before the stop string. The string that is complete first counts.

    Engines stop at the token that completes the string, or some tokens later, and give out all ids that they sampled. The
    ids are kept; what the agent sees ends before the string. It is looked for in the raw text, in front of the parser, as
    engines do: it may end an answer inside its reasoning or a call.

    ``stopped`` is the string that ended the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped: str | None = None

    def feed(self, text: str, *, final: bool = False) -> str:
        """Return the text that comes before any stop string. At the end there is nothing to wait for."""
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, size, self.stopped = min(found)
        else:
            size = len(self._held) - (0 if final else held_back(self._held, self._stops))
        ready, self._held = self._held[:size], self._held[size:]
        return ready


class ReplyStream:
    """Sampled ids, as they come, -> deltas for the agent; the same answer as `Renderer.parse` gives for all of them.

    ``stopped`` is the stop string that ended the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        parser: OutputParser,
        *,
        choice: int = 0,
        stops: Sequence[str] = (),
    ) -> None:
        stops = [stop for stop in stops if stop]
        self._cutter = StopCutter(stops) if stops else None
        self.stopped: str | None = None
        self._decoder = TextDecoder(tokenizer)
        self._stop_ids = stop_ids
        self._parser = parser
        self._choice = choice
        self._held: list[int] = []  # a stop token at the end so far: if it stays the last one, it is not text
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._status: ParseStatus = "none"

    def feed(self, ids: Sequence[int], *, final: bool = False) -> list[Delta]:
        """Read more ids. ``final``: they are the last ids, so all text is returned."""
        ready = [*self._held, *ids]
        self._held = [ready.pop()] if ready and ready[-1] in self._stop_ids else []
        text = self._decoder.feed(ready)
        if final:
            text += self._decoder.finish()
        if self._cutter is not None:
            text = self._cutter.feed(text, final=final)
            self.stopped = self._cutter.stopped
        deltas = self._parser.feed(text) if text else []
        if final:
            deltas += self._parser.finish()
            self._status = self._parser.status
        for delta in deltas:
            delta.choice = self._choice
            self._content.append(delta.text)
            self._reasoning.append(delta.reasoning)
            for call in delta.tool_calls:  # parsers give out a call when it is whole
                self._calls.append(ToolCall(id=call.id or "", name=call.name or "", arguments=call.arguments))
        return deltas

    def parsed(self, engine_reason: str | None = STOP) -> Choice:
        """Return the whole answer, after its final ids. Calls turn the engine's "stop" into "tool_calls"."""
        return Choice(
            index=self._choice,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=self._calls,
            finish_reason=TOOL_CALLS if self._calls and engine_reason == STOP else engine_reason,
            stop_sequence=self.stopped,
            parse_status=self._status,
        )
