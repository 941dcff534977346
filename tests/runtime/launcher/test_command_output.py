"""The output of commands reaches a slow reader whole, and a process that holds it open delays no end for long."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator

import pytest

from agentcore_rl_toolkit.runtime.launcher.command_output import AFTER_EXIT_S, copy_output
from agentcore_rl_toolkit.runtime.launcher.place import CHUNK_BYTES, NETWORK, Stream


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Stream, asyncio.StreamWriter]]:
    """The runtime's end of a connection, and the command's."""
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets are short, on macOS too
        async with await asyncio.start_unix_server(lambda _, writer: writers.put_nowait(writer), f"{folder}/s"):
            yield await NETWORK.connect_unix_socket(f"{folder}/s"), await writers.get()


async def test_a_slow_reader_gets_the_output_of_a_command_that_has_ended() -> None:
    ended, received = asyncio.get_running_loop().create_future(), b""

    async def write(name: str, data: bytes) -> None:
        nonlocal received
        await asyncio.sleep(2 * AFTER_EXIT_S)
        received += data

    async with connected() as (stream, writer):
        copying = asyncio.create_task(copy_output("stdout", stream, write, ended))
        writer.write(b"x" * 100_000)
        await writer.drain()
        writer.close()
        ended.set_result(0)
        await copying
    assert received == b"x" * 100_000


@pytest.mark.parametrize("chatty", [False, True])
async def test_output_that_stays_open_after_the_command_ends_soon(chatty: bool) -> None:
    ended, received = asyncio.get_running_loop().create_future(), 0
    ended.set_result(0)

    async def write(name: str, data: bytes) -> None:
        nonlocal received
        received += len(data)

    async def talk(writer: asyncio.StreamWriter) -> None:
        while chatty:
            writer.write(b"y" * 10_000)
            await writer.drain()

    async with asyncio.timeout(30), connected() as (stream, writer):
        asyncio.get_running_loop().call_later(0.1, writer.write, b"late")
        talking = asyncio.create_task(talk(writer))
        await copy_output("stdout", stream, write, ended)
        with pytest.raises(ConnectionError) if chatty else contextlib.nullcontext():
            await talking
        writer.close()
    assert 2**20 <= received < 2**20 + 2 * CHUNK_BYTES if chatty else received == len(b"late")
