"""The place of a session's files, and the interface of every kind of session process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpcore

from ...store.local import SessionFolder

CHUNK_BYTES = 64_000  # AWS: 64 KB a chunk
Stream = httpcore.AsyncNetworkStream
NETWORK = httpcore.AnyIOBackend()
Write = Callable[[str, bytes], Awaitable[None]]  # "stdout" or "stderr", and its output. No bytes at the end


@dataclass(frozen=True)
class Place:
    """The folder, log and socket of a session. ``name`` is unique among the sessions of an agent version.

    ``store`` is its folder in the store, None where the runtime has no store in a folder. ``node`` is the node of the cluster
    that has these files, None for this machine.
    """

    name: str
    directory: Path
    log_path: Path
    socket_path: str
    store: SessionFolder | None = None
    node: str | None = None


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command. ``code``: its exit status (negative: a signal), or -1 if it could not be started, for ``error``."""

    code: int
    timed_out: bool = False
    error: str | None = None


class SessionProcess(Protocol):
    """A running session: a process, a container, or one of them on another machine.

    Attributes:
        ended: resolves to the exit status. A negative status is the signal that killed the process. None means unknown.
        death: the cause of the end if the status does not show it.
        lost: True when the machine of the session failed.
    """

    ended: asyncio.Future[int | None]
    pid: int | None = None
    cpu_s: float | None = None
    death: str | None = None
    lost: bool = False

    async def dial(self) -> Stream:
        """Connect to the session's server. Raises: httpcore.NetworkError."""

    async def command(self, text: str, write: Write, timeout_s: float) -> CommandEnd:
        """Run a shell command in the session's environment to its end. ``write`` gets its output."""

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM now, and SIGKILL to all that it started after the grace. With a grace of 0 only SIGKILL is sent."""
