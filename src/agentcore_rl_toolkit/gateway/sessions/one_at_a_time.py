"""Requests that name the same session, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class OneAtATime:
    """Lets requests that name the same session go one after the other."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def of(self, session_ids: Iterable[str]) -> AsyncIterator[None]:
        names = set(session_ids)
        async with self._changed:
            await self._changed.wait_for(lambda: self._names.isdisjoint(names))
            self._names |= names
        try:
            yield
        finally:
            self._names -= names
            async with self._changed:
                self._changed.notify_all()
