"""Slots for live sessions, shared by all collections of a process."""

from __future__ import annotations

import asyncio
import weakref


class Places:
    """At most `limit` rollouts at once, on each event loop that uses it (a semaphore cannot serve two)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._per_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def __aenter__(self) -> None:
        await self._here().acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._here().release()

    def _here(self) -> asyncio.Semaphore:
        return self._per_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
