"""Connections are taken as fast as they come, and a process without descriptors recovers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from agentcore_rl_toolkit._servers.process import listen
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.http.accept import PER_TURN, Acceptor


class Greeter(asyncio.Protocol):
    """Says hello and keeps the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")


@contextlib.contextmanager
def clients(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(address, timeout=5))
            sock.setblocking(False)
            sockets.append(sock)
        yield sockets


def greeted(sockets: list[socket.socket]) -> int:
    count = 0
    for sock in sockets:
        with contextlib.suppress(BlockingIOError):
            count += sock.recv(5) == b"hello"
    return count


async def test_a_burst_of_connections_takes_a_few_turns_of_the_loop() -> None:
    listening = listen("127.0.0.1", 0)
    acceptor = Acceptor(listening, Greeter)
    try:
        with clients(listening.getsockname(), PER_TURN) as sockets:
            for _ in range(8):
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert greeted(sockets) == PER_TURN
    finally:
        acceptor.close()


async def test_with_no_descriptors_left_it_says_so_and_goes_on_once_there_are(caplog: pytest.LogCaptureFixture) -> None:
    listening = listen("127.0.0.1", 0)
    acceptor = Acceptor(listening, Greeter)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with clients(listening.getsockname(), 3) as sockets:
            free = os.dup(sockets[0].fileno())  # the kernel gives out the lowest
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            with caplog.at_level(logging.ERROR):
                await asyncio.sleep(0.05)
            assert greeted(sockets) == 0
            assert "no further connection" in caplog.text
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await asyncio.sleep(1.2)
            assert greeted(sockets) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        acceptor.close()


async def test_closing_ends_the_listening() -> None:
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    Acceptor(listening, Greeter).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=1)


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(ConfigError, match=str(first.getsockname()[1])):
        listen("127.0.0.1", first.getsockname()[1])
