"""Find which answers of a session a later request repeats or quotes.

Theory of operation. Texts are compared as words, so that escapes, quotes and white space do not matter. An index has the runs of
six words of every answer so far. Each message is looked up once, when a request brings it for the first time, so the cost is
linear in the text of the session. A run that the answer copied from its own prompt proves nothing and is not in the index.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from ...trajectory.turn import FLOWS

_RUN = 6  # words in a row
_STEP = 3  # from one run of an answer to the next: a quote of 11 words has two
_LETTERS = 12  # shorter texts turn up by chance: they count only as the whole result of a tool
_AS_GOOD = 0.75  # of the best share: attempts at one prompt that a text quotes as much all count

_WORD = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\+(u[0-9a-fA-F]{4}|.)")

Words = tuple[str, ...]


class Flows:
    """The answers of a session so far, in the order in which its calls started."""

    def __init__(self) -> None:
        self._answers: dict[str, list[str]] = {}  # the turns that gave exactly this answer, or made exactly this call
        self._asked: dict[str, tuple[int, Any, Any]] = {}  # number of a turn's messages, the first and the last
        self._runs: dict[int, dict[int, tuple[int, ...]]] = {}  # by length: the texts that have a run
        self._texts: list[tuple[str, str, int, int]] = []  # turn, how a quote is called, its prompt, number of runs
        self._found: dict[str, list[tuple[str, str]]] = {}  # what a text quotes
        self._fresh: list[Words] = []  # texts that the last request brought

    def into(self, asked: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Return the turns whose answers are in a request, each with one of `trajectory.turn.FLOWS`."""
        self._fresh = []
        last = next((at for at in reversed(range(len(asked))) if self._said(asked, at)), -1)
        # The messages before the last answer are those of its own call, and were looked up with it.
        known = last if last >= 0 and any(self._asked[turn][0] == last for turn in self._said(asked, last)) else 0
        found: list[tuple[str, str]] = []
        for at in range(known, len(asked)):
            message = asked[at]
            if turns := self._said(asked, at):
                ended = not message.get("tool_calls") and at + 1 < len(asked) and asked[at + 1].get("role") == "user"
                how = "history" if at < last else "reviewed" if ended else "continued"
                found += ((turn, how) for turn in turns)
            else:
                found += self._quoted(message)
        return dict(sorted(found, key=lambda flow: -FLOWS.index(flow[1])))

    def add(self, turn: str, message: Any, asked: Sequence[dict[str, Any]], prompt: int) -> None:
        """Add an answer to the last request. ``prompt`` is a hash of its messages."""
        self._asked[turn] = len(asked), asked[:1], asked[-1:]
        if not isinstance(message, dict):
            return
        for key in _keys(message):
            self._answers.setdefault(key, []).append(turn)
        texts = [("quoted", text.rpartition("</think>")[2]) for text in _texts(message)]
        texts += [
            ("called", text) for call in _calls(message) for text in (call["id"], *_strings(call.get("arguments")))
        ]
        for how, text in texts:
            words = _words(text)
            if sum(map(len, words)) < _LETTERS:
                continue
            size = min(_RUN, len(words))
            copied = {run for fresh in self._fresh for run in _runs(fresh, size)}
            runs = set(islice(_runs(words, size), 0, None, _STEP)) - copied
            known = self._runs.setdefault(size, {})
            known.update((run, (*known.get(run, ()), len(self._texts))) for run in runs)
            self._texts.append((turn, how, prompt, len(runs)))

    def _said(self, asked: Sequence[dict[str, Any]], at: int) -> list[str]:
        """The turns that gave exactly this assistant message. Of several, those that were asked with the messages before it."""
        if asked[at].get("role") != "assistant":
            return []
        turns = next((turns for key in _keys(asked[at]) if (turns := self._answers.get(key))), [])
        if len(turns) > 1:
            before = at, asked[:1], asked[at - 1 : at]
            turns = [turn for turn in turns if self._asked[turn] == before] or turns[-1:]
        return turns

    def _quoted(self, message: dict[str, Any]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        tool = message.get("role") == "tool"
        for text in _texts(message):
            if text not in self._found:
                words = _words(text)
                self._fresh.append(words)
                self._found[text] = self._search(words)
            found += self._found[text]
            for whole in (text, *_strings(text)) if tool else (text,):
                if tool or len(whole) >= _LETTERS:
                    found += ((turn, "quoted") for turn in self._answers.get(whole.strip(), ()))
        return found

    def _search(self, words: Words) -> list[tuple[str, str]]:
        hits: Counter[int] = Counter()
        for size, known in self._runs.items():
            for run in known.keys() & set(_runs(words, size)):
                hits.update(known[run])
        shares: dict[int, float] = {}  # of the texts
        best: dict[int, float] = {}  # of the attempts at a prompt
        for text, count in hits.items():
            _, how, prompt, total = self._texts[text]
            if count >= min(2, total):
                shares[text] = count / total
                if how == "quoted":
                    best[prompt] = max(best.get(prompt, 0.0), shares[text])
        quotes = [(*self._texts[text][:3], share) for text, share in shares.items()]
        return [
            (turn, how) for turn, how, prompt, share in quotes if how == "called" or share >= _AS_GOOD * best[prompt]
        ]


def _words(text: str) -> Words:
    if "\\" in text:
        text = _ESCAPE.sub(_unescape, text)
    return tuple(_WORD.findall(text)) or tuple(text.split())


def _unescape(match: re.Match[str]) -> str:
    letter = match[1]
    return chr(int(letter[1:], 16)) if len(letter) == 5 else " " if letter in "nrtbf" else letter


def _runs(words: Words, size: int) -> Iterator[int]:
    """Hashes of so many words in a row: numbers cost the garbage collector nothing."""
    return map(hash, zip(*(words[i:] for i in range(size)), strict=False))


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [text for text in parts if isinstance(text, str)]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [{**call["function"], "id": str(call.get("id"))} for call in calls if isinstance(call.get("function"), dict)]


def _keys(message: dict[str, Any]) -> list[str]:
    """What identifies an answer: its calls and their ids, either of them, else its text."""
    if calls := _calls(message):
        made = "".join(f"{call.get('name')}{call.get('arguments')}" for call in calls)
        made, ids = "".join(made.split()), " ".join(call["id"] for call in calls)
        return [f"{ids} {made}", ids, made]
    text = "".join(_texts(message)).rpartition("</think>")[2].strip()
    return [text] if text else []


def _strings(text: Any) -> list[str]:
    """The strings of a JSON document; none of other text."""
    try:
        pending = [msgspec.json.decode(text)] if isinstance(text, str) and text.lstrip()[:1] in ("{", "[") else []
    except msgspec.DecodeError:
        return []
    found: list[str] = []
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, (dict, list)):
            pending += value.values() if isinstance(value, dict) else value
    return found
