"""The side of a connection that faces an agent (or a trainer):

reads requests, hands them on one at a time, writes what it is told to write.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools

from .dialects.errors import RequestError
from .sharding import wanted
from .wire import CONTINUE, Request, error_reply

if TYPE_CHECKING:
    from .calls import Call
    from .server import Gateway

WRITE_HIGH = 256 * 2**10


class AgentConnection(asyncio.Protocol):
    """One client connection. ``call`` is the model call it is waiting for, ``task`` the administrative request."""

    __slots__ = (
        "_begun",
        "_between",
        "_body",
        "_closing",
        "_early",
        "_gateway",
        "_head_bytes",
        "_headers",
        "_parser",
        "_queue",
        "_reading",
        "_refused",
        "_shard",
        "_size",
        "_url",
        "busy",
        "call",
        "last_s",
        "paused_since",
        "private",
        "task",
        "transport",
        "writable",
    )

    def __init__(self, gateway: Gateway, *, private: bool = False, begun: bytes = b"") -> None:
        self._gateway = gateway
        self.private = private
        self._shard = None if private else gateway.shard
        self._between = True  # no request has begun: the connection may still go to another process
        self._early = b""
        self._begun = begun  # what another process had read before it handed the connection on
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._size = 0
        self._reading = True
        self._refused = False
        self._closing = False
        self.busy = False
        self.call: Call | None = None
        self.task: asyncio.Task[None] | None = None
        self.transport: Any = None
        self.paused_since: float | None = None
        self.writable: asyncio.Future[None] | None = None
        self.last_s = time.monotonic()

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=WRITE_HIGH)
        self._gateway.connections.add(self)
        if self._begun:
            begun, self._begun = self._begun, b""
            self.take(begun)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        shard = self._shard
        if shard is not None and self._between and not self.busy:
            data, self._early = self._early + data, b""
            if b"\r\n" not in data and len(data) < 8192:
                self._early = data
                return
            target = wanted(data, shard.count)
            if target is not None and target != shard.index:
                shard.hand_on(self, data, target)
                return
        self.take(data)

    def take(self, data: bytes) -> None:
        """Read bytes that are for this process."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.refuse(400, "this server does not upgrade connections")
        except httptools.HttpParserError as e:
            if not self._refused:
                self.refuse(400, f"the request is not valid HTTP: {e}")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.connections.discard(self)
        self._queue.clear()
        call, self.call = self.call, None
        if call is not None:
            call.agent_gone()
        if self.task is not None:
            self.task.cancel()
        if self.writable is not None and not self.writable.done():
            self.writable.set_exception(ConnectionResetError("the client went away"))

    def pause_writing(self) -> None:
        self.paused_since = time.monotonic()
        if self.call is not None:
            self.call.agent_slow()

    def resume_writing(self) -> None:
        self.paused_since = None
        if self.call is not None:
            self.call.agent_ready()
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)

    # -- from the parser

    def on_message_begin(self) -> None:
        self._between = False
        self._url = b""
        self._headers = {}
        self._head_bytes = 0
        self._body = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        limits = self._gateway.limits
        headers = self._headers
        if self._head_bytes > limits.header_bytes:
            self.refuse(431, f"the request head is larger than {limits.header_bytes} bytes")
            return
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > limits.body_bytes):
            self.refuse(413, f"the request body is larger than {limits.body_bytes} bytes")
        elif headers.get(b"expect", b"").lower() == b"100-continue":
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._gateway.limits.body_bytes:
            self._body.clear()
            if not self._refused:
                self.refuse(413, f"the request body is larger than {self._gateway.limits.body_bytes} bytes")
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._between = True
        if self._refused:
            return
        body = self._body
        path, _, query = self._url.partition(b"?")
        request = Request(
            self._parser.get_method(),
            path,
            query,
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
            self._parser.should_keep_alive(),
        )
        self._body = []
        if self.busy:
            self._queue.append(request)
            if self._reading:  # a client that sends ahead waits in the kernel, not in our memory
                self._reading = False
                self.transport.pause_reading()
            return
        self.busy = True
        self._gateway.dispatch(self, request)

    # -- towards the client

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error and end the connection:

        what follows on it cannot be told apart from the refused request.
        """
        self._refused = True
        self._body.clear()
        kind = "too_large" if status in (413, 431) else "invalid_request"
        self.transport.write(error_reply("chat", RequestError(message, kind=kind, status=status), keep_alive=False))
        self.transport.close()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken enough of what was written.

        Raises: ConnectionResetError when it went away.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the client went away")
        if self.paused_since is not None:
            self.writable = asyncio.get_running_loop().create_future()
            try:
                await self.writable
            finally:
                self.writable = None

    def done(self, *, keep_alive: bool = True) -> None:
        """The reply is written in full: go on with the next request."""
        self.call = None
        self.last_s = time.monotonic()
        if not keep_alive or self._closing:
            self.transport.close()
            return
        if self._queue:
            self._gateway.dispatch(self, self._queue.popleft())
            return
        self.busy = False
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()

    def finish(self) -> None:
        """Close as soon as nothing is under way (the gateway is stopping)."""
        self._closing = True
        if not self.busy:
            self.transport.close()
