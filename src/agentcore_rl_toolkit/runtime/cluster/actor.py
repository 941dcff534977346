"""The Ray actor of a node: runs a launcher, and connects the front to its sessions.

A session on a node is reached through one TCP port of the node. The first line of a connection is the session's token, which the
front got through Ray, and the rest is a connection to the session's server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import httpcore

from ...contract import AS_IS
from .. import roots
from ..agents import environments
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..launcher.place import CommandEnd, Place, SessionProcess
from ..launcher.session_log import read_log
from ..local_node import LocalNode
from .bundle import unpack

READ_BYTES = 64 * 1024


class NodeActor:
    """A launcher on a node. The methods are called by the front. Their arguments and results travel through Ray."""

    def __init__(self) -> None:
        self._root = roots.new_root()
        self._sessions: dict[str, tuple[SessionProcess, Place]] = {}  # the keys are tokens
        self._node: LocalNode
        self._server: asyncio.Server

    async def start(self, config: RuntimeConfig, host: str) -> tuple[int, int, str, str]:
        """Start the launcher, and listen on this address of the node. Returns port, process id, tier, and folder of logs."""
        root = self._root.path
        self._node = LocalNode(config, state_dir=root / "state", root=root)
        await self._node.start()
        self._server = await asyncio.start_server(self._connected, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return port, os.getpid(), self._node.tier, str(root / "state" / "logs")

    async def live(self) -> None:
        """Wait without end. The call fails when this actor ends."""
        await asyncio.Event().wait()

    async def prepare(self, agent: Agent, path: str, bundle: bytes) -> Agent:
        """Unpack an agent's project, build its environment, and load it. Returns the agent as it is here."""
        folder = self._root.path / "agents" / agent.folder
        await asyncio.to_thread(unpack, bundle, folder)
        as_is = AS_IS in self._node.environment(agent)
        python = await asyncio.to_thread(environments.build, folder / path, toolkit=as_is)
        here = dataclasses.replace(agent, script=folder / path, python=python)
        await self._node.prepare(here)
        return here

    async def spawn(self, agent: Agent, name: str, log: str) -> tuple[str, int | None]:
        """Start a session. Returns its token and its process id."""
        place = self._node.place(agent, name, log)
        process = await self._node.spawn(agent, place)
        token = secrets.token_urlsafe(24)
        self._sessions[token] = process, place
        return token, process.pid

    async def ended(self, token: str) -> tuple[int | None, str | None, float | None]:
        """Wait for the end of a session, and remove its files. Returns exit status, cause of death, and CPU time."""
        process, place = self._sessions[token]
        status = await process.ended
        del self._sessions[token]
        await self._node.discard(place)
        return status, process.death, process.cpu_s

    async def stop(self, token: str, grace_s: float) -> None:
        """Send SIGTERM to a session, and SIGKILL after the grace."""
        if token in self._sessions:
            self._sessions[token][0].stop(grace_s)

    async def forget(self, agent: Agent) -> None:
        """End an agent version with its sessions."""
        await self._node.forget(agent)

    async def read(self, path: str, offset: int, size: int) -> bytes:
        """Read a piece of a file of this node. A missing file is empty."""
        return await asyncio.to_thread(read_log, path, offset, size)

    async def close(self) -> None:
        """End every session, and remove all files."""
        await self._node.close()
        await asyncio.to_thread(roots.discard_root, self._root)

    async def command(self, token: str, text: str, timeout_s: float) -> AsyncIterator[tuple[str, bytes] | CommandEnd]:
        """Run a command in a session. Yield its output, and at last its end."""
        output: asyncio.Queue[tuple[str, bytes] | CommandEnd] = asyncio.Queue()

        async def write(name: str, data: bytes) -> None:
            await output.put((name, data))

        async def run() -> None:
            await output.put(await self._sessions[token][0].command(text, write, timeout_s))

        running = asyncio.create_task(run())
        while not isinstance(item := await output.get(), CommandEnd):
            yield item
        await running
        yield item

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        with contextlib.suppress(OSError, ValueError, httpcore.NetworkError), contextlib.closing(writer):
            token = (await reader.readline()).decode().strip()
            if token in self._sessions:
                async with contextlib.aclosing(await self._sessions[token][0].dial()) as there:
                    copies = [asyncio.create_task(_copy(reader.read, there.write))]
                    copies.append(asyncio.create_task(_copy(there.read, send)))
                    _, late = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                    for task in late:
                        task.cancel()


async def _copy(read: Callable[[int], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]) -> None:
    with contextlib.suppress(OSError, httpcore.NetworkError):
        while data := await read(READ_BYTES):
            await write(data)
