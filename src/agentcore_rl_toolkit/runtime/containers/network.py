"""Reaching a container's own loopback from outside: connections to its server, and listeners for the endpoints it may use.

A network namespace is a property of a thread, and a socket stays in the one it was made in. So a short-lived thread enters the
container's namespace, makes the socket there and hands it out: no port is published, two agents can both listen on 8080, an agent
that listens on 127.0.0.1 only is reached as well, and a container without any network still has its endpoints.

Needs a local engine and the right to enter its namespaces (root; Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...isolation.relay import hand_over
from ...isolation.spec import IsolationSpec
from ..roots import MARKER
from ..sessions.connection import UpstreamLostError

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
CONNECT_TIMEOUT_S = 10.0


def unreachable() -> str | None:
    """Why this process cannot enter other network namespaces; None when it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    return _in_thread(lambda: _enter_or_why("/proc/self/ns/net"))


class ContainerNetwork:
    """The network namespace of a running container, held open. ``close`` when the container is gone."""

    def __init__(self, pid: int, *, container: str, mark: str) -> None:
        """Raises: OSError when there is no such process here, or it is not the container's: a process has this mark in its
        environment, a gVisor sandbox the container's id on its command line."""
        self._fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        self._life: int | None = None
        marked = f"{MARKER}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if not marked and container.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
            self.close()
            raise ProcessLookupError(f"process {pid} is not the container's; the engine is on another machine")

    async def dial(self, port: int) -> socket.socket:
        """A connection to ``127.0.0.1:port`` inside. Raises: UpstreamLostError when nothing listens there."""

        def connect() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                sock.settimeout(CONNECT_TIMEOUT_S)
                sock.connect(("127.0.0.1", port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)
            except BaseException:
                sock.close()
                raise
            return sock

        try:
            return await asyncio.to_thread(self._inside, connect)
        except OSError as e:
            raise UpstreamLostError(f"cannot connect to the session's server: {e}") from e

    async def offer(self, spec: IsolationSpec) -> None:
        """Open the spec's endpoints inside and give them to its relay. Raises: OSError."""
        self._life = await asyncio.to_thread(self._inside, lambda: hand_over(spec))

    def close(self) -> None:
        for fd in (self._fd, self._life):
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fd, self._life = -1, None

    def _inside(self, work: Callable[[], T]) -> T:
        if self._fd < 0:
            raise ConnectionError("the container is gone")

        def enter_and_work() -> T:
            _setns(self._fd)
            return work()

        return _in_thread(enter_and_work)


def _in_thread(work: Callable[[], T]) -> T:
    """Run it in a thread of its own, whose namespaces go with it."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as e:  # handed to the caller
            errors.append(e)

    thread = threading.Thread(target=run, name="in a container's network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]


def _enter_or_why(path: str) -> str | None:
    try:
        with open(path) as namespace:
            _setns(namespace.fileno())
    except OSError as e:
        return f"entering a network namespace: {e.strerror}"
    return None


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
