"""The relay's carrying of bytes, without namespaces: both event loops, data that comes at once."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable

import pytest
import uvloop

from agentcore_rl_toolkit.runtime.isolation.relay import _Inner


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
        async with asyncio.timeout(10):
            while data := await asyncio.get_running_loop().sock_recv(client, 65536):
                received += data
    server.close()
    target.close()
    return received


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("size", [1, 5_000, 100_000])
def test_what_is_sent_before_the_outer_connection_stands_is_not_lost(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], size: int
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(carried_at_once(b"x" * size)) == b"got " + b"x" * size
