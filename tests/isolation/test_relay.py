"""The relay's carrying of bytes, without namespaces: both event loops, data that comes at once."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from agentcore_rl_toolkit.isolation.relay import Relay, _Inner


async def carried_at_once(request: bytes) -> bytes:
    """Connect, send and end before the relay's loop runs for the first time; return what the target answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.read())
        writer.close()

    target = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = target.sockets[0].getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = await asyncio.get_running_loop().create_server(functools.partial(_Inner, port, set()), sock=listener)
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        client.setblocking(False)
        received = b""
        async with asyncio.timeout(60):
            while data := await asyncio.get_running_loop().sock_recv(client, 65536):
                received += data
    server.close()
    target.close()
    return received


async def owners_of_a_carried_connection(folder: Path) -> list[object]:
    """Hand an endpoint over, connect through it, and ask the relay whose the connection is, before and after its end."""
    seen: list[object] = []
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        seen.append(relay.owner_of(writer.get_extra_info("peername"), writer.get_extra_info("sockname")))
        seen.append(
            relay.owner_of(("127.0.0.2", writer.get_extra_info("peername")[1]), writer.get_extra_info("sockname"))
        )
        writer.close()
        done.set()

    target = await asyncio.start_server(answer, "127.0.0.1", 0)
    endpoint = f"127.0.0.1:{target.sockets[0].getsockname()[1]}"
    relay = Relay(folder / "relay", (endpoint,))
    await relay.start()
    inner = socket.create_server(("127.0.0.1", 0))
    life = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    life.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(life, str(relay.path))
    port = int(endpoint.rpartition(":")[2])
    text = json.dumps({"ports": [port], "name": "17"}).encode()
    socket.send_fds(life, [text], [inner.fileno()])
    assert await loop.sock_recv(life, 2) == b"ok"
    with socket.create_connection(inner.getsockname()) as client:
        ends = client.getsockname()
        client.sendall(b"x")
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(60):
            await done.wait()
    assert relay.owner_of(ends, ("127.0.0.1", port)) is None
    inner.close()
    life.close()
    await relay.aclose()
    target.close()
    await asyncio.sleep(0)
    seen.append(len(relay._owners))
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel names the process")
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_relay_knows_whose_a_connection_is(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(owners_of_a_carried_connection(tmp_path)) == [(os.getpid(), "17"), None, 0]


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("size", [1, 5_000, 100_000])
def test_what_is_sent_before_the_outer_connection_stands_is_not_lost(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], size: int
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(carried_at_once(b"x" * size)) == b"got " + b"x" * size


async def test_a_session_that_comes_as_the_relay_ends_is_hung_up_on(tmp_path: Path) -> None:
    """Its task is cancelled before it began; nobody but the collector would close the connection."""
    relay = Relay(tmp_path / "relay", ("127.0.0.1:1",))
    await relay.start()
    with socket.socket(socket.AF_UNIX) as session, warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        session.setblocking(False)
        session.connect(str(tmp_path / "relay"))
        async with asyncio.timeout(30):
            while len(relay._tasks) < 2:  # noqa: ASYNC110  (a socket)
                await asyncio.sleep(0)
        await relay.aclose()
        gc.collect()
        assert session.recv(1) == b""
    assert [str(w.message) for w in left] == []
