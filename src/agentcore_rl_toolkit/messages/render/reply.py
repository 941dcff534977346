"""Sampled ids -> text, reasoning and calls, whole or as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..wire.canonical import STOP, TOOL_CALLS, Choice, Delta, ToolCall
from .parsers import OutputParser
from .parsers.base import held_back
from .tokens import TextDecoder, Tokenizer


class StopCutter:
    """Text in any slices -> the text before the stop string. Of several strings the one that is complete first counts.

    Engines stop at the token that completes the string, or some tokens later, and give out all ids that they sampled. The
    ids are kept; what the agent sees ends before the string. It is looked for in the raw text, in front of the parser, as
    engines do: it may end an answer in the middle of its reasoning or of a call.

    ``released`` is how much text is out, ``stopped`` the string that ended it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.released = 0
        self.stopped: str | None = None

    def feed(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            return self._release(at)
        return self._release(len(self._held) - held_back(self._held, self._stops))

    def finish(self) -> str:
        """The text held back because a stop string might have begun there."""
        return "" if self.stopped is not None else self._release(len(self._held))

    def _release(self, size: int) -> str:
        ready, self._held = self._held[:size], self._held[size:]
        self.released += size
        return ready


class ReplyStream:
    """Sampled ids, as they come, -> deltas for the agent; the same answer as `Renderer.parse` gives for all of them.

    ``settled`` counts the ids that belong to the answer for sure: with stop strings, those whose text begins in what is
    out; without, all of them.
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
        self._cutter = StopCutter(stops) if stops else None
        self._begins: deque[int] = deque()  # where the text of each id not yet settled begins
        self._text_size = 0
        self.settled = 0
        self._decoder = TextDecoder(tokenizer)
        self._stop_ids = stop_ids
        self._parser = parser
        self._choice = choice
        # A stop token at the end so far: only the text in front of the last one is the answer's.
        self._held: list[int] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        ready = self._held + list(ids)
        self._held = []
        if ready and ready[-1] in self._stop_ids:
            self._held = [ready.pop()]
        if self._cutter is not None:
            text = "".join(self._cut(self._cutter, token) for token in ready)
            return self._out(self._parser.feed(text)) if text else []
        self.settled += len(ids)
        return self._out(self._parser.feed(self._decoder.feed(ready))) if ready else []

    def finish(self) -> list[Delta]:
        """The text held back. Call it once, at the end of the completion."""
        text = self._decoder.finish()
        if self._cutter is not None:
            text = self._cutter.feed(text) + self._cutter.finish()
            self._settle(self._cutter.released)
            if self._cutter.stopped is None:
                self.settled += len(self._begins) + len(self._held)
        deltas = self._parser.feed(text)
        return self._out([*deltas, *self._parser.finish()])

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._cutter.stopped if self._cutter is not None else None

    def _cut(self, cutter: StopCutter, token: int) -> str:
        """The text that a token adds to the answer. One at a time, so that the answer's last token is known."""
        self._begins.append(self._text_size)
        text = self._decoder.feed([token])
        self._text_size += len(text)
        text = cutter.feed(text)
        self._settle(cutter.released)
        return text

    def _settle(self, released: int) -> None:
        while self._begins and self._begins[0] < released:
            self._begins.popleft()
            self.settled += 1

    def parsed(self, engine_reason: str | None = STOP) -> Choice:
        """The whole answer, after `finish`. Calls turn the engine's "stop" into "tool_calls"."""
        return Choice(
            index=self._choice,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=self._calls,
            finish_reason=TOOL_CALLS if self._calls and engine_reason == STOP else engine_reason,
            stop_sequence=self.stopped,
            parse_status=self._parser.status,
        )

    def _out(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            delta.choice = self._choice
            self._content.append(delta.text)
            self._reasoning.append(delta.reasoning)
            for call in delta.tool_calls:  # parsers give out a call when it is whole
                self._calls.append(ToolCall(id=call.id or "", name=call.name or "", arguments=call.arguments))
        return deltas
