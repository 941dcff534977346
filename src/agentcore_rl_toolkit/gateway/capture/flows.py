"""Find which answers of a session a later request repeats or quotes.

Theory of operation. Texts are compared as words, so that escapes, quotes and white space do not matter. An answer is known by its
runs of six words, every third of them. A run that the answer's own prompt has proves nothing and does not count. A message is
searched when a request brings it for the first time. So it never quotes what was said after it, and the cost is linear.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ...messages.errors import NOT_JSON
from ...trajectory.turn import FLOWS

_RUN = 6  # words in a row
_STEP = 3  # words from one run of an answer to the next: a quote of 11 words has two runs
_LETTERS = 12  # shorter texts turn up by chance: they count only as the whole result of a tool
_AS_GOOD = 0.75  # share of the best attempt at a prompt: a text that quotes attempts alike quotes them all

# A letter of a script without spaces (Thai to Khmer, kana, Han) is a word.
_SCRIPTS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_SCRIPTS}]|[^\W{_SCRIPTS}]+")
_ESCAPE = re.compile(r"\\+(u[0-9a-fA-F]{4}|.)")


class _Source(NamedTuple):
    """A text that prompts may quote: an answer, or a string in its call's arguments. ``request`` is a hash of its messages."""

    turn: str
    how: str
    request: int
    runs: int


class Flows:
    """The answers of a session so far, in the order in which its calls started."""

    def __init__(self) -> None:
        self._turns: dict[str, list[str]] = {}  # turns by the keys of their answers
        self._requests: dict[str, tuple[int, Any, Any]] = {}  # number of a turn's messages, the first and the last
        self._sources: list[_Source] = []
        self._source_runs: dict[int, list[int]] = {}  # sources by run
        self._sizes: set[int] = set()  # the lengths of their runs
        self._texts: dict[str, int] = {}  # the texts of prompts, numbered
        self._text_runs: dict[int, list[int]] = {}  # texts by run
        self._prompt: set[int] = set()  # the texts of the last request
        self._flows: dict[tuple[str, str], list[tuple[str, str]]] = {}  # quoted turns by message

    def into(self, asked: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the turns whose answers are in a request, each with the strongest of `trajectory.turn.FLOWS`."""
        self._prompt = {self._number(text) for message in asked for text in _texts(message)}
        last = next((at for at in reversed(range(len(asked))) if self._said(asked, at)), -1)
        # Answers before the last one are in the history of the request that got the last one.
        known = last >= 0 and any(self._requests[turn][0] == last for turn in self._said(asked, last))
        found: dict[str, str] = {}
        for at, message in enumerate(asked):
            if known and at < last and message.get("role") == "assistant":
                continue
            flows = self._quoted(message)
            if turns := self._said(asked, at):
                ended = not message.get("tool_calls") and at + 1 < len(asked) and asked[at + 1].get("role") == "user"
                flows = [(turn, "history" if at < last else "reviewed" if ended else "continued") for turn in turns]
            for turn, how in flows:
                found[turn] = min(how, found.get(turn, how), key=FLOWS.index)
        return found

    def add(self, turn: str, message: Any, asked: Sequence[dict[str, Any]], request: int) -> None:
        """Add an answer to the last request. ``request`` is a hash of its messages."""
        self._requests[turn] = len(asked), asked[:1], asked[-1:]
        if not isinstance(message, dict):
            return
        for key in _keys(message):
            self._turns.setdefault(key, []).append(turn)
        sources = [("quoted", text.rpartition("</think>")[2]) for text in _texts(message)]
        sources += [("called", text) for call in _calls(message) for text in _strings(call.get("arguments"))]
        for how, text in sources:
            words = _words(text)
            if sum(map(len, words)) < _LETTERS:
                continue
            size, texts = min(_RUN, len(words)), self._text_runs
            if size not in self._sizes:
                self._sizes.add(size)
                for text, number in self._texts.items():
                    self._index(text, number, {size})
            runs = {r for r in islice(_runs(words, size), 0, None, _STEP) if self._prompt.isdisjoint(texts.get(r, ()))}
            for run in runs:
                self._source_runs.setdefault(run, []).append(len(self._sources))
            self._sources.append(_Source(turn, how, request, len(runs)))

    def _number(self, text: str) -> int:
        if text not in self._texts:
            self._texts[text] = len(self._texts)
            self._index(text, self._texts[text], self._sizes)
        return self._texts[text]

    def _index(self, text: str, number: int, sizes: set[int]) -> None:
        words = _words(text)
        for run in {run for size in sizes for run in _runs(words, size)}:
            self._text_runs.setdefault(run, []).append(number)

    def _said(self, asked: Sequence[dict[str, Any]], at: int) -> list[str]:
        """Return the turns that gave this assistant message. Of several, those that were asked with the messages before it."""
        if asked[at].get("role") != "assistant":
            return []
        turns = next((turns for key in _keys(asked[at]) if (turns := self._turns.get(key))), [])
        before = at, asked[:1], asked[at - 1 : at]
        return [turn for turn in turns if len(turns) == 1 or self._requests[turn] == before] or turns[-1:]

    def _quoted(self, message: dict[str, Any]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        tool = message.get("role") == "tool"
        for text in _texts(message):
            key = str(message.get("tool_call_id")), text
            if key not in self._flows:
                wholes = [text, *_strings(text)] if tool else [text] if len(text) >= _LETTERS else []
                exact = [(turn, "quoted") for whole in wholes for turn in self._turns.get(whole.strip(), ())]
                self._flows[key] = [*exact, *self._search(text)]
            found += self._flows[key]
        return found

    def _search(self, text: str) -> list[tuple[str, str]]:
        words, hits = _words(text), Counter[int]()
        for run in {run for size in self._sizes for run in _runs(words, size)}:
            hits.update(self._source_runs.get(run, ()))
        quotes = [
            (source, count / source.runs)
            for source, count in ((self._sources[at], count) for at, count in hits.items())
            if count >= min(2, source.runs)
        ]
        best: dict[int, float] = {}  # the best share among the attempts at a request
        for source, share in quotes:
            if source.how == "quoted":
                best[source.request] = max(best.get(source.request, 0.0), share)
        return [
            (source.turn, source.how)
            for source, share in quotes
            if source.how == "called" or share >= _AS_GOOD * best[source.request]
        ]


def _words(text: str) -> list[str]:
    if "\\" in text:
        text = _ESCAPE.sub(_unescape, text)
    return _WORD.findall(text) or text.split()


def _unescape(match: re.Match[str]) -> str:
    letter = match[1]
    return chr(int(letter[1:], 16)) if len(letter) == 5 else " " if letter in "nrtbf" else letter


def _runs(words: Sequence[str], size: int) -> Iterator[int]:
    """Yield hashes of so many words in a row: numbers cost the garbage collector nothing."""
    return map(hash, zip(*(words[i:] for i in range(size)), strict=False))


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [text for text in parts if isinstance(text, str)]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    listed = message.get("tool_calls")
    calls = [call for call in listed if isinstance(call, dict)] if isinstance(listed, list) else []
    return [{**call["function"], "id": str(call.get("id"))} for call in calls if isinstance(call.get("function"), dict)]


def _keys(message: dict[str, Any]) -> list[str]:
    """Return what identifies an answer: its calls and their ids, either of them, or its text if it has no calls."""
    if calls := _calls(message):
        made = "".join(f"{call.get('name')}{call.get('arguments')}" for call in calls)
        made, ids = "".join(made.split()), " ".join(call["id"] for call in calls)
        return [f"{ids} {made}", ids, made]
    text = "".join(_texts(message)).rpartition("</think>")[2].strip()
    return [text] if text else []


def _strings(text: Any) -> list[str]:
    """Return the strings of a JSON document. Other text has none."""
    try:
        pending = [msgspec.json.decode(text)] if isinstance(text, str) and text.lstrip()[:1] in ("{", "[") else []
    except NOT_JSON:
        return []
    found: list[str] = []
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, (dict, list)):
            pending += value.values() if isinstance(value, dict) else value
    return found
