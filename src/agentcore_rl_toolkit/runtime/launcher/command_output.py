"""The output of a command in a forked session: one unix connection for each stream, named by its first byte, `o` or `e`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator

from .place import CHUNK_BYTES, Write

AFTER_EXIT_S = 0.5  # wait for the rest of the output if a background process holds it open
REST_BYTES = 2**20  # limit of that rest. The buffers on the way hold less of the command's own output
_NAMES = {b"o": "stdout", b"e": "stderr"}


@contextlib.asynccontextmanager
async def written(path: str, write: Write) -> AsyncIterator[None]:
    """Listen at ``path``, and pass the output to ``write``. At the end of the block, wait for the rest of the output."""
    copying: set[asyncio.Task[None]] = set()
    stream_ends = asyncio.Semaphore(0)
    writing, bytes_left = 0, math.inf  # streams that wait for the reader of the output, who may be slow

    async def copy(name: str, reader: asyncio.StreamReader) -> None:
        nonlocal writing, bytes_left
        data = b"-"
        while data and bytes_left > 0:
            data = await reader.read(CHUNK_BYTES)
            bytes_left -= len(data)
            writing += 1
            try:
                await write(name, data)
            finally:
                writing -= 1

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        copying.add(task)
        try:
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                await copy(_NAMES[await reader.readexactly(1)], reader)
        finally:
            stream_ends.release()

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield
        bytes_left, idle, ended = float(REST_BYTES), 0, 0
        while ended < len(_NAMES) and idle < 2:  # twice: a busy machine may have had no time for the first
            before = bytes_left
            try:
                async with asyncio.timeout(AFTER_EXIT_S / 2):
                    await stream_ends.acquire()
                    ended += 1
            except TimeoutError:
                idle = 0 if writing or bytes_left != before else idle + 1
        for task in copying:
            task.cancel()
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
