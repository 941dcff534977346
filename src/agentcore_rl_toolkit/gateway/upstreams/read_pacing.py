"""Reading many slow streams in fewer, larger pieces.

A thousand agents at a hundred tokens a second are a hundred thousand tiny reads and writes a second, more than a core
can do one by one. Once there are too many, a stream that has just brought a token or two rests for some milliseconds,
so that the kernel gathers its next tokens into one read. Nothing is delayed while there is time for every piece, nor is
the first token of any stream, nor a stream that brings a lot at once.

How many are too many depends on the machine, and on what else the process and the machine do: it is read from how much
of the time the thread runs, or would run if it were let.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

BUSY = 0.85  # share of the time from which streams rest; below two thirds of it they rest less
FEW_PER_S = 1_000  # small reads that are not what keeps a process busy
SMALL_BYTES = 4096
SHORTEST_S, LONGEST_S = 0.004, 0.1
WINDOW_S = 0.05
AT_ONCE = 64  # streams woken in one turn of the loop: a thousand would hold it for as long as their reading takes


def busy_s() -> float:
    """Seconds that this thread has run or waited for a core that others had.

    Where the kernel does not tell how long it waited, the time it ran.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            ran, waited, _ = file.read(100).split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


class Pace:
    """How long a stream should rest: as long as it takes to keep the thread busy for `BUSY` of its time at most."""

    def __init__(self) -> None:
        self.rest_s = 0.0
        self._reads = 0
        self._since = 0.0
        self._busy_s = 0.0

    def due(self, now: float) -> bool:
        """Count one more small read. Returns whether it is time for `judge`."""
        self._reads += 1
        return now - self._since >= WINDOW_S

    def judge(self, now: float, busy: float) -> None:
        """``busy``: seconds that the thread has been busy since some moment, the same for all calls."""
        elapsed = now - self._since
        many = self._reads / elapsed > FEW_PER_S
        share = (busy - self._busy_s) / elapsed / BUSY if many else 0.0
        # The first window is not one: it began whenever there were streams before.
        began, self._reads, self._since, self._busy_s = elapsed < 10 * WINDOW_S, 0, now, busy
        if not began:
            return
        if share > 1:
            self.rest_s = min(LONGEST_S, max(SHORTEST_S, self.rest_s) * min(share * share, 1.5))
        elif share < 2 / 3:
            self.rest_s *= max(share, 0.5)
            if self.rest_s < SHORTEST_S:
                self.rest_s = 0.0


class Reader(Protocol):
    """What takes the bytes of a stream."""

    def may_read(self) -> bool: ...


class Resting(Protocol):
    """A connection whose reading can rest."""

    transport: asyncio.Transport

    @property
    def reader(self) -> Reader | None: ...


class Pacer:
    """Lets streams rest, and wakes them together."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._resting: list[Resting] = []
        self._waking: list[Resting] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def rest(self, connection: Resting) -> None:
        """A stream has brought little: stop reading it until the next wake-up, if there are many such."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        now = loop.time()
        if self._pace.due(now):
            self._pace.judge(now, busy_s())
        rest_s = self._pace.rest_s
        if not rest_s:
            return
        if not self._resting:
            loop.call_later(rest_s, self._wake)
        connection.transport.pause_reading()
        self._resting.append(connection)

    def _wake(self) -> None:
        begun = bool(self._waking)
        self._waking += self._resting
        self._resting = []
        if not begun:
            self._wake_some()

    def _wake_some(self) -> None:
        some, self._waking = self._waking[:AT_ONCE], self._waking[AT_ONCE:]
        for connection in some:
            reader = connection.reader
            if reader is not None and reader.may_read() and not connection.transport.is_closing():
                connection.transport.resume_reading()
        if self._waking and self._loop is not None:
            self._loop.call_soon(self._wake_some)
