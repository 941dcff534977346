"""The output of a command in a forked session: one connection for each stream."""

from __future__ import annotations

import asyncio
from typing import Any

import httpcore

from .place import CHUNK_BYTES, Stream, Write

AFTER_EXIT_S = 0.5  # wait for the rest of the output if a background process holds it open
REST_BYTES = 2**20  # limit of that rest, which is more than the buffers of the command's own output


async def copy_output(name: str, stream: Stream, write: Write, ended: asyncio.Future[int | None]) -> None:
    """Pass a stream to ``write``, whose reader may be slow, until it is closed, or the command has ended and nothing comes."""
    data, bytes_left = b"-", REST_BYTES
    while data and bytes_left > 0:
        reading = asyncio.ensure_future(stream.read(CHUNK_BYTES))
        either: list[asyncio.Future[Any]] = [reading, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            await asyncio.wait([reading], timeout=AFTER_EXIT_S)
        try:
            data = reading.result() if reading.done() else b""
        except httpcore.NetworkError:
            data = b""
        reading.cancel()
        if ended.done():
            bytes_left -= len(data)
        await write(name, data)
    await stream.aclose()
