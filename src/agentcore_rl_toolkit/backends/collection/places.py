"""Slots for live sessions, shared by all collections of a process."""

from __future__ import annotations

import asyncio
import time
import weakref


class Places:
    """At most `limit` rollouts at once, on each event loop that uses it (a semaphore cannot serve two).

    It also has the time of the last move: while rollouts get slots, leave the runtime's queue or end, others may wait for any
    time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._per_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._moved_s = time.monotonic()

    def moved(self) -> None:
        self._moved_s = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds in which nothing moved."""
        return time.monotonic() - self._moved_s

    async def acquire(self) -> None:
        await self._here().acquire()

    def release(self) -> None:
        self._here().release()
        self.moved()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self.release()

    def _here(self) -> asyncio.Semaphore:
        return self._per_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
