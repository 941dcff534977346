"""A session's process on another machine, as the session table sees it: the same futures and verbs as one of this machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import weakref
from typing import Any, Protocol

from ...errors import LocalRuntimeError
from ..sessions.connection import UpstreamLostError

LINE_BYTES = 2**20
CAUSE_WAIT_S = 3.0


class Link(Protocol):
    """The connection to a node, as its sessions need it."""

    @property
    def node_id(self) -> str: ...

    async def dial(self, purpose: dict[str, Any]) -> socket.socket: ...

    async def request(self, op: str, **fields: Any) -> dict[str, Any]: ...

    def send(self, **message: Any) -> None: ...


class RemoteProcess:
    """``started``, ``ended``, ``pid``, ``cpu_s``, ``max_rss_bytes`` as of `SessionProcess`. ``lost``: why its node is gone."""

    def __init__(self, link: Link, session_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.id = session_id
        self.node_id = link.node_id
        self.pid: int | None = None
        self.cpu_s: float | None = None
        self.max_rss_bytes: int | None = None
        self.lost: str | None = None
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self._link = link
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    async def dial(self) -> socket.socket:
        """A connection to the session's server. Raises: UpstreamLostError."""
        if self.lost is not None:
            raise UpstreamLostError(self.lost)
        try:
            sock = await self._link.dial({"kind": "session", "id": self.id})
        except LocalRuntimeError as e:
            raise UpstreamLostError(str(e)) from e
        self._sockets.add(sock)
        return sock

    async def cause(self) -> str | None:
        """After a connection broke: why, when it was the node that went. Waits a little for that to show."""
        if self.lost is None:
            await asyncio.wait([self.ended], timeout=CAUSE_WAIT_S)
        return self.lost

    async def read_log(self, offset: int) -> bytes:
        """What the session has written so far, from an offset on. Raises: LocalRuntimeError."""
        answer = await self._link.request("log", id=self.id, offset=offset)
        return base64.b64decode(answer["data"])

    def stop(self, grace_s: float) -> None:
        """SIGTERM now and SIGKILL after the grace."""
        self._link.send(op="stop", id=self.id, grace_s=grace_s)

    def command(self, command_id: str, text: str, socket_path: str) -> RemoteCommand:
        """Run a shell command beside the session; its outputs connect to this unix socket, as on one machine."""
        return RemoteCommand(self._link, self.id, command_id, text, socket_path)

    # -- what the link learns
    def on_started(self, pid: int) -> None:
        self.pid = pid
        if not self.started.done():
            self.started.set_result(pid)

    def on_ended(self, status: int | None, why: str) -> None:
        if not self.started.done():
            self.started.set_exception(LocalRuntimeError(why, session_id=self.id))
            self.started.exception()  # retrieved: a caller that gave up waiting is no reason for a warning
        if not self.ended.done():
            self.ended.set_result(status)

    def on_lost(self, why: str) -> None:
        """Its node is gone: break what is connected to it, so that no call waits for an answer that cannot come."""
        self.lost = why
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.on_ended(None, why)


class RemoteCommand:
    """A command beside a remote session, over a connection of its own: a slow reader slows the command, not the node."""

    def __init__(self, link: Link, session_id: str, command_id: str, text: str, socket_path: str) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.error: str | None = None
        self._killed = asyncio.Event()
        purpose = {"kind": "command", "session": session_id, "id": command_id}
        self._task = asyncio.create_task(self._run(link, purpose, text, socket_path))

    def kill(self) -> None:
        self._killed.set()

    async def _run(self, link: Link, purpose: dict[str, Any], text: str, socket_path: str) -> None:
        status = -1
        outputs: dict[str, asyncio.StreamWriter] = {}
        killer: asyncio.Task[None] | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=await link.dial(purpose), limit=LINE_BYTES)
            writer.write(json.dumps(text).encode() + b"\n")
            killer = asyncio.create_task(self._kill(writer))
            while line := await reader.readline():
                message = json.loads(line)
                if "end" in message:
                    status, self.error = message["end"], message["error"]
                    break
                stream = message["k"]
                if stream not in outputs:
                    _, outputs[stream] = await asyncio.open_unix_connection(socket_path)
                    outputs[stream].write(stream.encode())
                outputs[stream].write(base64.b64decode(message["d"]))
                await outputs[stream].drain()
            writer.close()
        except (LocalRuntimeError, OSError) as e:
            self.error = str(e)
        finally:
            if killer is not None:
                killer.cancel()
            for output in outputs.values():
                output.close()
            if not self.ended.done():
                self.ended.set_result(status)

    async def _kill(self, writer: asyncio.StreamWriter) -> None:
        await self._killed.wait()
        writer.write(b"kill\n")
