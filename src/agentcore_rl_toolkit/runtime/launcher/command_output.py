"""The output of a command in a forked session: one unix connection for each stream, named by its first byte, `o` or `e`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import AsyncIterator

from .place import CHUNK_BYTES, Write

AFTER_EXIT_S = 0.5  # wait for the rest of the output if a background process holds it open
REST_BYTES = 2**20  # limit of that rest, which is more than the buffers of the command's own output
_NAMES = {b"o": "stdout", b"e": "stderr"}


@contextlib.asynccontextmanager
async def written(path: str, write: Write) -> AsyncIterator[None]:
    """Listen at ``path``, and pass the output to ``write``. At the end of the block, wait for the rest of the output."""
    writing, bytes_left = 0, math.inf  # streams that wait for the reader of the output, who may be slow

    async def copy(connection: socket.socket) -> None:
        nonlocal writing, bytes_left
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(ConnectionError, EOFError), contextlib.closing(writer):
            name, data = _NAMES[await reader.readexactly(1)], b"-"
            while data and bytes_left > 0:
                data = await reader.read(CHUNK_BYTES)
                bytes_left -= len(data)
                writing += 1
                await write(name, data)
                writing -= 1

    async def copy_all() -> None:
        async with asyncio.TaskGroup() as copies:
            for _ in _NAMES:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                copies.create_task(copy(connection))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        copying = asyncio.create_task(copy_all())
        try:
            yield
            bytes_left, idle = float(REST_BYTES), 0
            while not copying.done() and idle < 2:  # twice: a busy machine may have had no time for the first
                before = bytes_left
                await asyncio.wait([copying], timeout=AFTER_EXIT_S / 2)
                idle = 0 if writing or bytes_left != before else idle + 1
        finally:
            copying.cancel()
            await asyncio.wait([copying])  # the listener is not closed under it
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
