"""The output of commands reaches a slow reader whole, and a process that holds it open delays no end for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.runtime.launcher import command_output
from agentcore_rl_toolkit.runtime.launcher.command_output import AFTER_EXIT_S, copy_output
from agentcore_rl_toolkit.runtime.launcher.place import NETWORK, Stream


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[Stream, asyncio.StreamWriter]]:
    """The runtime's end of a connection, and the command's."""
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda _, writer: writers.put_nowait(writer), path)
    async with server:
        yield await NETWORK.connect_unix_socket(str(path)), await writers.get()


async def test_a_slow_reader_gets_the_output_of_a_command_that_has_ended(tmp_path: Path) -> None:
    ended, received = asyncio.get_running_loop().create_future(), b""

    async def write(name: str, data: bytes) -> None:
        nonlocal received
        await asyncio.sleep(2 * AFTER_EXIT_S)
        received += data

    async with connected(tmp_path / "s") as (stream, writer):
        copying = asyncio.create_task(copy_output("stdout", stream, write, ended))
        writer.write(b"x" * 100_000)
        await writer.drain()
        writer.close()
        ended.set_result(0)
        await copying
    assert received == b"x" * 100_000


@pytest.mark.parametrize("chatty", [False, True])
async def test_output_that_stays_open_after_the_command_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatty: bool
) -> None:
    monkeypatch.setattr(command_output, "REST_BYTES", 100_000)
    ended = asyncio.get_running_loop().create_future()

    async def write(name: str, data: bytes) -> None:
        await asyncio.sleep(0)

    async def talk(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"y" * 10_000)
            await writer.drain()

    async with asyncio.timeout(30), connected(tmp_path / "s") as (stream, writer):
        copying = asyncio.create_task(copy_output("stdout", stream, write, ended))
        talking = asyncio.create_task(talk(writer)) if chatty else None
        await asyncio.sleep(0.05)
        ended.set_result(0)
        await copying
        if talking is not None:
            with pytest.raises(ConnectionError):
                await talking
        writer.close()
