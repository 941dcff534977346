"""The output of commands reaches a slow reader whole, and a process that holds it open delays no end for long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentcore_rl_toolkit.runtime.launcher import command_output
from agentcore_rl_toolkit.runtime.launcher.command_output import AFTER_EXIT_S, written


async def test_a_slow_reader_gets_the_output_of_a_command_that_has_ended(tmp_path: Path) -> None:
    path, received = str(tmp_path / "s"), b""

    async def write(name: str, data: bytes) -> None:
        nonlocal received
        await asyncio.sleep(2 * AFTER_EXIT_S)
        received += data

    async with written(path, write):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"o" + b"x" * 100_000)
        await writer.drain()
        writer.close()
    assert received == b"x" * 100_000


@pytest.mark.parametrize("chatty", [False, True])
async def test_output_that_stays_open_after_the_command_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatty: bool
) -> None:
    monkeypatch.setattr(command_output, "REST_BYTES", 100_000)
    path = str(tmp_path / "s")

    async def write(name: str, data: bytes) -> None:
        await asyncio.sleep(0)

    async def talk(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"y" * 10_000)
            await writer.drain()

    async with asyncio.timeout(30), written(path, write):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"o")
        talking = asyncio.create_task(talk(writer)) if chatty else None
        await asyncio.sleep(0.05)
    if talking is not None:
        with pytest.raises(ConnectionError):
            await talking
    writer.close()
