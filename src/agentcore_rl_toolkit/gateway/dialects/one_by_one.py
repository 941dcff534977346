"""Tool calls of a stream one after the other, for dialects that write one at a time.

An engine may write pieces of parallel calls in turns. Then the first call is streamed, and the others wait until it is
whole, which only the end of the reply tells.
"""

from __future__ import annotations

from collections.abc import Iterable

from .canonical import ToolDelta


class OneByOne:
    """Sorts pieces of calls into those that may be written now and those that have to wait."""

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
