"""The output of a command in a forked session: one unix connection for each stream, named by its first byte, `o` or `e`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from .place import CHUNK_BYTES, Write

AFTER_EXIT_S = 0.5  # wait for the rest of the output if a background process holds it open
_NAMES = {b"o": "stdout", b"e": "stderr"}


@contextlib.asynccontextmanager
async def written(path: str, write: Write) -> AsyncIterator[None]:
    """Listen at ``path``, and pass the output to ``write``. At the end of the block, wait for the rest of the output."""
    copying: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        copying.add(task)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            name = _NAMES[await reader.readexactly(1)]
            while data := await reader.read(CHUNK_BYTES):
                await write(name, data)
            await write(name, b"")

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
