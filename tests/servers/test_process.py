"""The life of a server: its signals, its parent, its open files, and the connections that it had just accepted."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import subprocess
import warnings
from collections.abc import Callable

import pytest

from agentcore_rl_toolkit._servers.open_files import raise_file_limit
from agentcore_rl_toolkit._servers.process import bind, parent_gone, stop_event, stop_listening


class Protocol(asyncio.Protocol):
    def __init__(self, known: list[asyncio.Transport]) -> None:
        self._known = known

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._known.append(transport)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1_024, 4_096, [(4_096, 4_096)]),
        (1_024, resource.RLIM_INFINITY, [(65_536, resource.RLIM_INFINITY)]),
        (4_096, 4_096, []),
        (90_000, 100_000, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: list[tuple[int, int]]
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_file_limit()
    assert limits == raised


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_what_a_server_has_just_accepted_is_a_connection_or_was_never_taken(turns: int) -> None:
    known: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Protocol(known), sock=bind("127.0.0.1", 0), backlog=16)
    callers = [socket.create_connection(server.sockets[0].getsockname()) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop_listening(server)
        assert len(known) == 3 or turns < 2  # a turn that sees the callers, and one that takes them
        for transport in known:
            transport.abort()
        await asyncio.sleep(0)
        gc.collect()
    for caller in callers:
        with caller:
            caller.settimeout(60)
            try:
                assert caller.recv(1) == b""
            except ConnectionResetError:
                continue


def ended() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.mark.parametrize(("pid", "over"), [(os.getpid, False), (os.getppid, False), (ended, True)])
async def test_the_end_of_a_process_is_awaited(pid: Callable[[], int], over: bool) -> None:
    waiting = asyncio.create_task(parent_gone(pid()))
    await asyncio.sleep(0)
    assert waiting.done() is over
    waiting.cancel()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
async def test_a_server_stops_at_a_signal_or_with_its_parent(number: int | None) -> None:
    stop = stop_event(ended() if number is None else None)
    for _ in range(3):
        await asyncio.sleep(0)
    if number is not None:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
    await asyncio.wait_for(stop.wait(), 60)
    for handled in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(handled)
