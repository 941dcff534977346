"""Text completions: what was sampled is the answer, to the last blank."""

from __future__ import annotations

from ...dialects.canonical import Delta, ParseStatus


class RawParser:
    """A parser that reads nothing into the text: no reasoning, no calls, no blanks to leave out."""

    status: ParseStatus = "none"

    def feed(self, text: str) -> list[Delta]:
        return [Delta(text=text)] if text else []

    def finish(self) -> list[Delta]:
        return []
