"""Reading many slow streams in fewer, larger pieces.

A thousand agents at a hundred tokens a second are a hundred thousand tiny reads and writes a second, more than a core
can do one by one. Once there are too many, a stream that has just brought a token or two rests for some milliseconds,
so that the kernel gathers its next tokens into one read. Nothing is delayed while there is time for every piece, nor is
the first token of any stream, nor a stream that brings a lot at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .upstream import UpstreamConnection

MANY_PER_S = 20_000  # small pieces that a core relays one by one in two thirds of its time
SMALL_BYTES = 4096
SHORTEST_S, LONGEST_S = 0.004, 0.08
WINDOW_S = 0.05


class Pace:
    """How long a stream should rest: as long as it takes to keep small reads between 0.7 and 1 times `MANY_PER_S`."""

    def __init__(self) -> None:
        self.rest_s = 0.0
        self._reads = 0
        self._since = 0.0

    def read(self, now: float) -> float:
        """One more small read. Returns the rest from now on, in seconds; 0 is none."""
        self._reads += 1
        elapsed = now - self._since
        if elapsed < WINDOW_S:
            return self.rest_s
        share = self._reads / elapsed / MANY_PER_S
        self._reads, self._since = 0, now
        if share > 1:
            self.rest_s = min(LONGEST_S, max(SHORTEST_S, self.rest_s) * min(share, 2.0))
        elif share < 0.7:
            self.rest_s *= max(share, 0.5)
            if self.rest_s < SHORTEST_S:
                self.rest_s = 0.0
        return self.rest_s


class Pacer:
    """Lets streams rest, and wakes all of them together."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._resting: list[UpstreamConnection] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def rest(self, connection: UpstreamConnection) -> None:
        """A stream has brought little: stop reading it until the next wake-up, if there are many such."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        rest_s = self._pace.read(loop.time())
        if not rest_s:
            return
        if not self._resting:
            loop.call_later(rest_s, self._wake)
        connection.transport.pause_reading()
        self._resting.append(connection)

    def _wake(self) -> None:
        resting, self._resting = self._resting, []
        for connection in resting:
            reader = connection.reader
            if reader is not None and reader.may_read() and not connection.transport.is_closing():
                connection.transport.resume_reading()
