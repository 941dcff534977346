"""Text stays text: a marker in what a user, a tool or a page says is no marker of the conversation.

Theory of operation. Before a template sees the messages, each marker of the tokenizer in their texts is replaced by a word that
nothing else contains. In what the template wrote, the stretches between its own markers that hold such words get their text back
and are encoded by a tokenizer that knows no markers. Text without a marker, which is nearly all, is not touched.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from .tokens import Tokenizer

_LIKE_A_MARKER = re.compile(r"[<\[|｜].+[>\]|｜]", re.DOTALL)  # added tokens that are words or blanks are no markers


class PlainText:
    """Replaces markers in texts and encodes what a template made of them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, own_marks: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.added_texts
        markers = [text for text in found if _LIKE_A_MARKER.fullmatch(text)]
        self._word = f"\ue0f0{secrets.token_hex(8)}"
        self._texts = markers
        self._places = {text: place for place, text in enumerate(markers)}
        self._all = _any_of(markers)
        # The policy's own marks of reasoning and of calls mean something to the template also in an answer's text.
        self._in_answers = _any_of([text for text in markers if text not in own_marks])
        self._of_template = _any_of(found)
        self._masked = re.compile(self._word + "_([0-9]+)\ue0f1")
        self._plain: Tokenizer | None = None

    def mask(self, value: Any, *, sampled: bool = False) -> Any:
        """The same JSON value with words in place of markers; the value itself where there are none."""
        pattern = self._in_answers if sampled else self._all
        if pattern is None:
            return value
        if isinstance(value, str):
            return pattern.sub(self._covered, value) if pattern.search(value) else value
        if isinstance(value, list):
            new: Any = [self.mask(item, sampled=sampled) for item in value]
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        if isinstance(value, dict):
            new = {key: self.mask(item, sampled=sampled) for key, item in value.items()}
            return value if all(new[key] is item for key, item in value.items()) else new
        return value

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template is to get them."""
        return [self.mask(message, sampled=message.get("role") == "assistant") for message in messages]

    def _covered(self, match: re.Match[str]) -> str:
        return f"{self._word}_{self._places[match[0]]}\ue0f1"

    def count(self, text: str) -> int:
        """Masked markers in what a template wrote."""
        return text.count(self._word)

    def shown(self, text: str) -> str:
        """The text with its markers."""
        return self._masked.sub(lambda match: self._texts[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """The ids of what a template wrote."""
        if self._word not in text or self._of_template is None:
            return self._tokenizer.encode(text)
        if self._plain is None:
            self._plain = self._tokenizer.without_markers()
        ids: list[int] = []
        usual = ""
        at = 0
        for start, end in [*(match.span() for match in self._of_template.finditer(text)), (len(text), len(text))]:
            between = text[at:start]
            if self._word in between:
                ids += self._tokenizer.encode(usual) if usual else []
                ids += self._plain.encode(self.shown(between))
                usual = ""
            else:
                usual += between
            usual += text[start:end]
            at = end
        return ids + (self._tokenizer.encode(usual) if usual else [])


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
