"""Reading many slow streams in fewer, larger pieces.

A thousand agents at a hundred tokens a second are a hundred thousand tiny reads and writes a second, more than a core
can do one by one. When many calls run, a stream that has just brought a token or two rests for a few milliseconds, so
that the kernel gathers its next tokens into one read. Few calls are never delayed, nor is the first token of any, nor
a stream that brings a lot at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .upstream import UpstreamConnection

READS_PER_S = 25_000  # of small pieces, relayed one by one, that a core has time for
SMALL_BYTES = 4096
FEW = 400  # running calls up to which every piece is passed on as it comes
LONGEST_S = 0.08


class Pacer:
    """Lets streams rest, and wakes all of them together. ``running`` tells how many calls run."""

    def __init__(self, running: Callable[[], int]) -> None:
        self._running = running
        self._resting: list[UpstreamConnection] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def interval_s(self) -> float:
        count = self._running()
        return 0.0 if count <= FEW else min(LONGEST_S, count / READS_PER_S)

    def rest(self, connection: UpstreamConnection) -> None:
        """Stop reading a stream until the next wake-up, if there are many."""
        if not self._resting:
            interval = self.interval_s()
            if not interval:
                return
            loop = self._loop or asyncio.get_running_loop()
            self._loop = loop
            loop.call_later(interval, self._wake)
        connection.transport.pause_reading()
        self._resting.append(connection)

    def _wake(self) -> None:
        resting, self._resting = self._resting, []
        for connection in resting:
            reader = connection.reader
            if reader is not None and reader.may_read() and not connection.transport.is_closing():
                connection.transport.resume_reading()
