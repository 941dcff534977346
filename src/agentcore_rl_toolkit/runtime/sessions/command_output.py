"""The output of a command beside a session: it connects to a unix socket twice, and names each stream in one byte, `o` or `e`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

AFTER_EXIT_S = 0.5  # how long to wait for the rest when something in the background holds the output open
Copy = Callable[[bytes, asyncio.StreamReader], Awaitable[None]]


class CommandOutput:
    """Listens at ``path`` while it is entered. ``copy`` reads one stream to its end."""

    def __init__(self, path: str, copy: Copy) -> None:
        self._path = path
        self._copy = copy
        self._copying: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> CommandOutput:
        self._server = await asyncio.start_unix_server(self._connected, self._path)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._copying.append(task)
        try:
            await self._copy(await reader.read(1), reader)
        except ConnectionError:
            return
        finally:
            writer.close()

    async def rest(self) -> None:
        """The command has ended: wait for what it wrote last."""
        await asyncio.sleep(0)
        if self._copying:
            _, late = await asyncio.wait(self._copying, timeout=AFTER_EXIT_S)
            for task in late:
                task.cancel()
