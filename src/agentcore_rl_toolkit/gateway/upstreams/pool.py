"""Connections to one inference server: a stack of idle ones, O(1) to take and to give back.

A connection carries one call at a time and tells it what arrives: `Reader.on_head`, `on_data` (all body bytes of one
read), `on_complete`, `on_lost`. Nothing is parsed beyond HTTP framing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Any, Protocol

import httptools

from ..config import UpstreamConfig
from ..http.messages import JOINED_BYTES

# Inference servers listen with a backlog of 100 to 2048; a burst of connection attempts above it waits a whole second
# for the kernel's retransmission, which is what p99 at a few hundred agents would consist of.
MAX_CONNECTING = 128
IDLE_S = 4.0  # uvicorn closes idle connections after 5 s; a call sent into that moment would have to be repeated


class Reader(Protocol):
    """The receiver of a reply that a connection reads."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...
    def on_data(self, pieces: list[bytes]) -> None: ...
    def on_complete(self) -> None: ...
    def on_lost(self, error: Exception | None, *, reused: bool, began: bool) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection; `reader` is the call it serves, None while idle."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.reader: Reader | None = None
        self.transport: Any = None
        self.idle_since = 0.0
        self.uses = 0
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser for every HTTP chunk: no Python frame in between
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._began = False
        self._complete = False
        self._keep = False
        self._until_close = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, reader: Reader, head: bytes, *body: bytes) -> None:
        self.reader = reader
        self.uses += 1
        self._began = self._complete = self._until_close = False
        if sum(map(len, body)) < JOINED_BYTES:
            self.transport.write(b"".join((head, *body)))
        else:
            self.transport.writelines((head, *body))

    def abort(self) -> None:
        """Drop the call: the server sees its client go away and stops generating."""
        self.reader = None
        if self.transport is not None:
            self.transport.abort()

    # -- from the transport

    def data_received(self, data: bytes) -> None:
        reader = self.reader
        if reader is None:  # bytes without a request: this connection cannot be trusted with another call
            self.transport.abort()
            return
        self._began = True
        pieces = self._pieces
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(e)
            return
        if pieces:
            if self.reader is reader:
                reader.on_data(pieces)
            pieces.clear()
        if self._complete and self.reader is reader:
            self._complete = False
            self.reader = None
            if self._keep:
                self.transport.resume_reading()  # the reply's last bytes may have paused it for a slow agent
                self._pool.give(self)
            else:
                self.transport.close()
            reader.on_complete()

    def eof_received(self) -> None:
        if self._until_close and self.reader is not None:
            reader, self.reader = self.reader, None
            reader.on_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        reader, self.reader = self.reader, None
        if reader is None:
            return
        if self._until_close and exc is None:
            reader.on_complete()
        else:
            reader.on_lost(exc, reused=self.uses > 1, began=self._began)

    def _fail(self, error: Exception) -> None:
        reader, self.reader = self.reader, None
        self.transport.abort()
        if reader is not None:
            reader.on_lost(error, reused=False, began=True)

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...

    # -- from the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status < 200:
            return
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)
        self._until_close = not framed and status not in (204, 304)
        if self.reader is not None:
            self.reader.on_head(status, headers)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._keep = self._parser.should_keep_alive()  # the parser has forgotten it once this returns


class Pool:
    """Connections to one server."""

    def __init__(self, config: UpstreamConfig, *, connect_s: float) -> None:
        self.config = config
        self.connect_s = connect_s
        self.idle: deque[UpstreamConnection] = deque()
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)
        self._tls = ssl.create_default_context() if config.tls else None

    def take(self) -> UpstreamConnection | None:
        """The idle connection used last, or None: then `connect`."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection, or one that became idle meanwhile. Raises: OSError."""
        config = self.config
        async with self._connecting:
            connection = self.take()
            if connection is not None:
                return connection
            try:
                async with asyncio.timeout(self.connect_s):
                    _, connection = await asyncio.get_running_loop().create_connection(
                        lambda: UpstreamConnection(self),
                        config.host,
                        config.port,
                        ssl=self._tls,
                        server_hostname=config.host if self._tls else None,
                    )
            except TimeoutError:
                raise ConnectionError(f"no connection to {config.url} within {self.connect_s:g} s") from None
            return connection

    def give(self, connection: UpstreamConnection) -> None:
        """A connection is free."""
        connection.idle_since = time.monotonic()
        self.idle.append(connection)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle for `IDLE_S`; the oldest lie at the bottom."""
        idle = self.idle
        while idle and (now - idle[0].idle_since > IDLE_S or idle[0].transport.is_closing()):
            idle.popleft().transport.close()

    def close(self) -> None:
        for connection in self.idle:
            connection.transport.close()
        self.idle.clear()
