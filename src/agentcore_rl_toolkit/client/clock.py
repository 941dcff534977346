"""Deadlines that run only while the client's loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

TICK_S = 0.25


class Clock:
    """The clock of a client's loop. It stands still while the process is stopped and while a caller's function blocks the loop.

    A timer ticks while there are deadlines. It is due before every deadline that passes during a standstill, so it runs first
    and moves them all.
    """

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()
        self._due_s: float | None = None  # of the next tick
        self._stood_still_s = 0.0

    def now(self) -> float:
        """Monotonic seconds without standstills."""
        return time.monotonic() - self._stood_still_s

    @contextlib.asynccontextmanager
    async def timeout(self, limit_s: float | None) -> AsyncIterator[None]:
        """`asyncio.timeout` on this clock. None: no limit."""
        async with asyncio.timeout(limit_s) as deadline:
            if limit_s is not None:
                self._deadlines.add(deadline)
                if self._due_s is None:
                    self._schedule()
            try:
                yield
            finally:
                self._deadlines.discard(deadline)

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + TICK_S
        loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        assert self._due_s is not None
        late_s = asyncio.get_running_loop().time() - self._due_s
        if late_s > TICK_S:
            self._stood_still_s += late_s
            for deadline in self._deadlines:
                if (when_s := deadline.when()) is not None and not deadline.expired():
                    deadline.reschedule(when_s + late_s)
        self._due_s = None
        if self._deadlines:
            self._schedule()
