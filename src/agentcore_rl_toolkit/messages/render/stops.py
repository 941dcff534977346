"""Where a stop string ends an answer.

Engines stop at the token that completes the string, or some tokens later, and give out all ids that they sampled. The
ids are kept as they are; what the agent sees ends before the string. It is looked for in the raw text, in front of the
parser, as engines do: a stop string may end an answer in the middle of its reasoning or of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from .parsers.base import held_back


class StopCutter:
    """Text in any slices -> the text before the stop string. Of several strings the one that is complete first counts.

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
        """What was held back because a stop string might have begun there."""
        return "" if self.stopped is not None else self._release(len(self._held))

    def _release(self, size: int) -> str:
        ready, self._held = self._held[:size], self._held[size:]
        self.released += size
        return ready
