"""The output of a command beside a forked session: one unix connection for each stream, named by its first byte, `o` or `e`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

AFTER_EXIT_S = 0.5  # how long to wait for the rest when something in the background holds the output open
CHUNK_BYTES = 64_000  # AWS: 64 KB a chunk
Write = Callable[[str, bytes], Awaitable[None]]  # stdout or stderr, and what came; nothing at its end
_NAMES = {b"o": "stdout", b"e": "stderr"}


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended. ``code``: its exit status (negative: a signal), -1 when it could not be started, for ``error``."""

    code: int
    timed_out: bool = False
    error: str | None = None


@contextlib.asynccontextmanager
async def written(path: str, write: Write) -> AsyncIterator[None]:
    """Listen at ``path``, and hand on what comes. The block ends with the command; what it wrote last is waited for."""
    copying: list[asyncio.Task[None]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        copying.append(task)
        try:
            name = _NAMES[await reader.read(1)]
            while data := await reader.read(CHUNK_BYTES):
                await write(name, data)
            await write(name, b"")
        except (ConnectionError, KeyError):
            return
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield
        await asyncio.sleep(0)
        if copying:
            _, late = await asyncio.wait(copying, timeout=AFTER_EXIT_S)
            for task in late:
                task.cancel()
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
