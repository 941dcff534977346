"""A node agent's listening side: who connects proves itself, then talks to the agent or straight to a session.

A connection for a session becomes a pair of transports that hand each other's bytes on, with back pressure; nothing in it
is looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from . import handshake
from .pipe import Pipe

Handler = Callable[[dict[str, Any], asyncio.StreamReader, "Front"], Coroutine[Any, Any, None]]
BUFFER_BYTES = 2**20


class Front(Pipe):
    """A connection to the agent. ``session_socket`` maps a session's id to its unix socket, None: there is no such session."""

    def __init__(self, token: str, handler: Handler, session_socket: Callable[[str], str | None]) -> None:
        super().__init__()
        self._token = token
        self._handler = handler
        self._session_socket = session_socket
        self._nonce = handshake.new_nonce()
        self._head = bytearray()
        self._reader: asyncio.StreamReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()

    def send(self, **message: Any) -> None:
        """Write one line of JSON."""
        if not self.transport.is_closing():
            self.transport.write(json.dumps(message).encode() + b"\n")

    async def drain(self) -> None:
        """Wait until the other side has read enough of what was sent."""
        await self._can_write.wait()

    def pause_writing(self) -> None:
        self._can_write.clear()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._can_write.set()
        super().resume_writing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self._nonce)
        self._deadline = asyncio.get_running_loop().call_later(handshake.TIMEOUT_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.feed_data(data)
        elif self.other is not None:
            super().data_received(data)
        else:
            self._head += data
            line, newline, rest = self._head.partition(b"\n")
            if newline and self._task is None:
                self._open(bytes(line), bytes(rest))
            elif len(self._head) > handshake.LINE_LIMIT_BYTES and self._task is None:
                self._refuse()

    def eof_received(self) -> bool:
        if self._reader is not None:
            self._reader.feed_eof()
            return False
        return super().eof_received() if self.other is not None else False

    def connection_lost(self, error: Exception | None) -> None:
        self._can_write.set()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reader is not None:
            self._reader.feed_eof()
        super().connection_lost(error)

    def _refuse(self) -> None:
        self.transport.abort()

    def _open(self, line: bytes, rest: bytes) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        purpose = handshake.verify(self._token, self._nonce, line)
        if purpose is None:
            self._refuse()
            return
        if purpose.get("kind") == "session":
            path = self._session_socket(str(purpose.get("id")))
            if path is None:
                self._refuse()
                return
            self.transport.pause_reading()
            self._task = asyncio.create_task(self._join(path, len(line) + 1))
            return
        self._reader = asyncio.StreamReader(limit=BUFFER_BYTES)
        self._reader.set_transport(self.transport)
        if rest:
            self._reader.feed_data(rest)
        self._task = asyncio.create_task(self._handle(purpose))

    async def _handle(self, purpose: dict[str, Any]) -> None:
        assert self._reader is not None
        try:
            await self._handler(purpose, self._reader, self)
        finally:
            self.transport.close()

    async def _join(self, path: str, skip: int) -> None:
        half = Pipe()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: half, path)
        except OSError:
            self._refuse()
            return
        if self.transport.is_closing():  # gone in the meantime
            half.transport.close()
            return
        half.other, self.other = self, half
        waiting = bytes(self._head[skip:])
        if waiting:
            half.transport.write(waiting)
        self._head.clear()
        self.transport.resume_reading()
