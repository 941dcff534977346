"""Sampled text -> content, reasoning and tool calls, piece by piece.

Theory of operation. A parser is fed text in any slices and gives deltas; fed everything at once it gives the same
answer, so there is one code path for streamed and whole replies. Text that could be the beginning of a marker is held
back until that is decided. A tool call is given out when its block is closed and understood. A block that is not
understood is given out as content, exactly as it was sampled, and the status is "unparsed": it looked like a call
and did not parse.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...wire.canonical import Delta, ParseStatus, ToolDelta, new_id

Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schemas of its parameters by name


@dataclass(frozen=True, slots=True)
class Call:
    """A call as parsed: ``arguments`` is JSON text."""

    name: str
    arguments: str


class OutputParser:
    """A reply in progress. This class takes all of the text as the answer, without reasoning and calls.

    Subclasses give out calls, and set ``bad`` when a text looked like a call and did not parse.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._bad = False
        self._plain: list[str] = []  # the answer's text

    @property
    def status(self) -> ParseStatus:
        return "unparsed" if self._bad else "parsed" if self._calls else "none"

    def feed(self, text: str) -> list[Delta]:
        return [Delta(text=text)] if text else []

    def finish(self) -> list[Delta]:
        return []

    def _say(self, text: str) -> list[Delta]:
        self._plain.append(text)
        return [Delta(text=text)] if text else []

    def _emit(self, call: Call) -> Delta:
        piece = ToolDelta(index=self._calls, id=new_id("call_"), name=call.name, arguments=call.arguments)
        self._calls += 1
        return Delta(tool_calls=[piece])


# The text between a block's markers -> its calls, and the text around them. None if it cannot be read.
ParseBlock = Callable[[str, Schemas], Sequence[Call | str] | None]


class CallTag(NamedTuple):
    """The form of a call: ``begin % name``, arguments of the type ``content``, ``end``.

    ``trigger`` opens calls in the text ("": the answer is nothing but calls), and ``between`` is written between two.
    """

    begin: str
    end: str
    trigger: str
    between: str = "\n"
    content: str = "json_schema"


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The marks of a model family for reasoning and calls.

    A template with all strings of one of ``signs`` is of this family. ``parser`` reads its answers; the others describe blocks to
    `MarkerParser`. ``tag`` is for engines that enforce calls (`forcing`).

    ``blocks`` are (opening, closing) marker pairs around calls; ``skip`` are markers that carry nothing by
    themselves, next to a call; ``hints`` are strings that, left over in plain content, say that a call was meant; of a
    ``hint_pairs`` entry both have to be there. ``whole`` says of a block that the answer ended in that nothing of the call is
    missing: half a call is none, its last value may be cut.

    ``reasoning_head`` is the model's text after the opening mark of its reasoning. ``calls_end_reasoning``: engines execute
    a call that is written before the reasoning is closed. ``call_id`` is the form of the ids that the prompt must show, from the
    ``{name}`` of a call and its ``{index}`` in the conversation.
    """

    name: str
    signs: tuple[tuple[str, ...], ...] = ()
    parser: Callable[..., OutputParser] | None = None
    tag: CallTag | None = None
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    blocks: tuple[tuple[str, str], ...] = ()
    parse_block: ParseBlock = lambda _inner, _schemas: None
    skip: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    hint_pairs: tuple[tuple[str, str], ...] = ()
    whole: Callable[[str], bool] = lambda _inner: False
    reasoning_head: str = ""
    calls_end_reasoning: bool = False
    call_id: str = ""

    def new_parser(
        self, *, tools: Sequence[dict[str, Any]] | None = None, reasoning_open: bool = False
    ) -> OutputParser:
        """Return a parser for one reply. Without ``tools`` it reads nothing as a call."""
        return (self.parser or MarkerParser)(self, tools=tools, reasoning_open=reasoning_open)

    def hinted(self, text: str) -> bool:
        """Return True if text outside of calls looks as if a call was meant."""
        return any(hint in text for hint in self.hints) or any(a in text and b in text for a, b in self.hint_pairs)


def schemas_of(tools: Sequence[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return parameter schemas by tool name, for formats that do not state the type of a value."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function") or {}
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[str(function.get("name"))] = properties if isinstance(properties, dict) else {}
    return found


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that could begin a marker."""
    first = {marker[0] for marker in markers}
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for size in range(longest, 0, -1):
        if text[-size] in first and any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


@functools.cache
def any_of(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern that finds the first of these texts, the longest at its place, or None without texts."""
    known = sorted({text for text in texts if text}, reverse=True)
    return re.compile(_branches(known)) if known else None


def _branches(texts: Sequence[str]) -> str:
    """Return a pattern with one branch per next character, so that its cost does not grow with the number of texts."""
    found = []
    for first, group in itertools.groupby(texts, lambda text: text[:1]):
        rest = [text[1:] for text in group]
        found.append(re.escape(first) + (re.escape(rest[0]) if len(rest) == 1 else f"(?:{_branches(rest)})"))
    return "|".join(found)


class Held:
    """Text that waits for a mark. Each piece is searched once, however much is held before it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._end = ""  # it may be the beginning of a mark

    def add(self, text: str, marks: Sequence[str]) -> bool:
        new = self._end + text
        self._parts.append(text)
        self._end = new[-max(map(len, marks), default=1) :]
        return any(mark in new for mark in marks)

    def take(self) -> str:
        text, self._end = "".join(self._parts), ""
        self._parts.clear()
        return text


class MarkerParser(OutputParser):
    """Parser for a `Grammar`. ``reasoning_open``: the prompt itself ended with the opening marker of the reasoning."""

    def __init__(
        self, grammar: Grammar, *, tools: Sequence[dict[str, Any]] | None = None, reasoning_open: bool = False
    ) -> None:
        super().__init__()
        self._grammar = grammar
        self._schemas = schemas_of(tools)
        self._blocks = dict(grammar.blocks) if tools else {}
        self._skip = grammar.skip if tools else ()
        self._tools = bool(tools)
        self._held = Held()
        self._state = "content"
        self._marks: tuple[str, ...] = ()  # that end the current segment
        self._open = ""
        self._fresh = True  # nothing of the current segment shown yet: blank lines at its start are the template's
        self._blank: list[str] = []  # blanks (and skipped markers) at the end of a segment, shown only if text follows
        self._before = ""  # such blanks in front of the open block, shown if the block turns out to be text
        self._thinking = False  # the open block began inside the reasoning
        self._reasoned = False  # the reasoning has ended, by its mark or by a call
        self._ended_by_call = False
        self._thoughts: list[str] = []
        self._segment("reasoning" if reasoning_open and grammar.reasoning else "content")
        self._start = self._state == "content" and grammar.reasoning is not None  # reasoning may still come

    def feed(self, text: str) -> list[Delta]:
        found = self._held.add(text, self._marks)
        if (self._state == "call" and not found) or (self._start and text.isspace()):
            return []
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        deltas = self._run(final=True)
        if self._state == "call":
            deltas += self._close_block(self._held.take(), closed=False)
        if self._state == "content":
            # Blanks at the very end were sampled as part of the answer, unless a call came before them.
            if not self._calls:
                deltas += self._say("".join(self._blank))
            self._blank = []
        if self._state == "reasoning":
            # A model that did not close its reasoning may have a call in it, which is not a call for the agent.
            thought = "".join(self._thoughts)
            self._bad = any(opening in thought for opening in self._blocks)
        if self._tools and not self._bad:
            self._bad = self._grammar.hinted("".join(self._plain))
        return deltas

    def _run(self, *, final: bool) -> list[Delta]:
        text = self._held.take()
        at = self._begin(text, final=final) if self._start else 0  # where the part that is not read begins
        deltas: list[Delta] = []
        while at >= 0 and (pattern := any_of(self._marks)) and (found := pattern.search(text, at)):
            before, at = text[at : found.start()], found.end()
            deltas += self._pass(before, found[0])
        at = max(at, 0)
        head = self._grammar.reasoning_head if self._state == "reasoning" and self._fresh and not final else ""
        if self._state != "call" and not self._start and not head.startswith(text[at:].lstrip("\n") or "\0"):
            size = len(text) - (0 if final else held_back(text[at:], self._marks))
            deltas += self._text(text[at:size])
            at = size
        self._held.add(text[at:], self._marks)
        return deltas

    def _parsed(self, inner: str, closing: str) -> Sequence[Call | str] | None:
        # Formats whose opening marker is part of the call (<function=...) see the block with its markers.
        block = self._open + inner + closing if self._open.endswith("=") else inner
        return self._grammar.parse_block(block, self._schemas)

    def _begin(self, whole: str, *, final: bool) -> int:
        """Decide whether the answer begins with reasoning. Returns where its first segment begins, -1 while that is open."""
        assert self._grammar.reasoning is not None
        marker = self._grammar.reasoning[0]
        text = whole.lstrip()
        if not final and (not text or (len(text) < len(marker) and marker.startswith(text))):
            return -1
        self._start = False
        if not text.startswith(marker):
            return 0
        self._segment("reasoning")
        return len(whole) - len(text) + len(marker)

    def _pass(self, before: str, marker: str) -> list[Delta]:
        if self._state == "call" and marker == self._blocks[self._open]:
            return self._close_block(before, closed=True)
        # The reasoning ends before a call in it: it only mentioned one.
        deltas = self._as_text(self._open + before) if self._state == "call" else self._text(before)
        opening, closing = self._grammar.reasoning or ("", "")
        if marker in self._blocks:
            self._before, self._open, self._thinking = "".join(self._blank), marker, self._state == "reasoning"
            self._segment("call")
        elif marker == closing and (self._state == "reasoning" or self._fresh or self._ended_by_call):
            self._reasoned, self._ended_by_call = True, False
            self._segment("content")
        elif self._fresh and (marker == opening or (self._calls and self._state == "content")):
            self._blank = []
        else:
            self._blank.append(marker)  # text after all, if no call follows
        return deltas

    def _segment(self, state: str) -> None:
        self._state = state
        self._fresh = True
        self._blank = []
        grammar, calls = self._grammar, (*self._blocks, *self._skip)
        end = (grammar.reasoning or ("", ""))[1:]
        if state == "call":
            self._marks = (self._blocks[self._open], *(end if self._thinking else ()))
        elif state == "reasoning":
            self._marks = (*(grammar.reasoning or ()), *(calls if grammar.calls_end_reasoning else ()))
        else:
            self._marks = (*calls, *(end if self._reasoned else ()))

    def _text(self, text: str) -> list[Delta]:
        if self._fresh and not self._blank:
            if self._state == "reasoning":
                text = text.lstrip("\n").removeprefix(self._grammar.reasoning_head)
            # Between calls all blanks are markup; elsewhere only the line ends that templates put around reasoning.
            text = text.lstrip() if self._calls and self._state == "content" else text.lstrip("\n")
        if not text:
            return []
        solid = text.rstrip()
        if not solid:
            self._blank.append(text)
            return []
        # Text between or after calls is a separate line for the agent.
        joint = "\n" if self._fresh and self._calls and self._plain and self._state == "content" else ""
        shown = "".join((joint, *self._blank, solid))
        self._blank = [text[len(solid) :]] if len(text) > len(solid) else []
        self._fresh = False
        if self._state == "reasoning":
            self._thoughts.append(shown)
            return [Delta(reasoning=shown)]
        return self._say(shown)

    def _as_text(self, raw: str) -> list[Delta]:
        """Give out a block that is no call, in the segment in which it began."""
        blank, self._before = self._before, ""
        self._segment("reasoning" if self._thinking else "content")
        self._fresh = False
        (self._thoughts if self._thinking else self._plain).append(blank + raw)
        return [Delta(reasoning=blank + raw) if self._thinking else Delta(text=blank + raw)]

    def _close_block(self, inner: str, *, closed: bool) -> list[Delta]:
        closing = self._blocks[self._open]
        raw = self._open + inner + (closing if closed else "")
        if not closed:
            inner = inner[: len(inner) - held_back(inner, [closing])]
        found = self._parsed(inner, closing) if closed or self._grammar.whole(inner) else None
        if found is None:
            return self._as_text(raw)
        self._reasoned, self._ended_by_call = self._reasoned or self._thinking, self._ended_by_call or self._thinking
        self._thinking, self._before = False, ""
        self._segment("content")
        return [
            delta for each in found for delta in ([self._emit(each)] if isinstance(each, Call) else self._text(each))
        ]
