"""aiohttp's server with the parts that it lacks: an end to stalled readers, errors in JSON, and patience without descriptors.

A handler is a task of its connection: aiohttp cancels it when the client goes away.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..._servers.tasks import Tasks
from ...messages.errors import RequestError
from ..config import Limits
from .compression import decompress, encoding_of
from .responses import error_response

log = logging.getLogger(__name__)

STALLED_S = 60.0  # an agent that reads nothing of its reply for this long is gone
ACCEPTED_AT_ONCE = 100  # connections, before the event loop does other work
FULL_S = 0.1  # pause after the system had no file descriptor for a connection
WARN_EVERY_S = 60.0
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def keep_alive(sock: socket.socket) -> None:
    """Let the system find out that the peer is gone, in two minutes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Connection(web.RequestHandler):
    """One client connection. ``paused_since`` is when its client last took bytes, while some of ``unsent`` wait for it."""

    __slots__ = ("paused_since", "unsent")

    def __init__(self, server: Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self.paused_since: float | None = None
        self.unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_alive(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=0)  # type: ignore[attr-defined]  # drained: the system has all of it
        super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused_since = time.monotonic()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused_since = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is no HTTP, or at which a handler failed, and end the connection."""
        if isinstance(exc, ConnectionError) or request.writer.output_size:
            raise ConnectionResetError("the client went away, or has a part of the reply") from exc
        why = (message or "it cannot be read").strip().splitlines()[0]
        error = RequestError(f"the request is not valid HTTP: {why}", status=status)
        if status == 500:
            log.error("a request failed", exc_info=exc)
            error = RequestError("the gateway could not handle this request; see its log", kind="internal")
        response = error_response("chat", error)
        response.force_close()
        return response


class Server(web.Server):
    """The open connections of a gateway."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=limits.idle_connection_s,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            auto_decompress=False,
        )

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)

    def __len__(self) -> int:
        return len(self._connections)

    def sweep(self) -> None:
        """End connections whose clients read nothing."""
        now = time.monotonic()
        connections: dict[Any, Any] = self._connections
        for connection, transport in list(connections.items()):
            if connection.paused_since is None:
                continue
            unsent = transport.get_write_buffer_size()
            if unsent < connection.unsent:
                connection.paused_since = now
            connection.unsent = unsent
            if now - connection.paused_since > STALLED_S:
                transport.abort()


class Listener:
    """Accepts the connections of a listening socket. Without a free file descriptor they wait in the system's queue.

    Event loops do not wait: uvloop closes such a connection, and asyncio logs an error for each.
    """

    def __init__(self, listening: socket.socket, server: Server) -> None:
        listening.setblocking(False)
        self._socket = listening
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._opening = Tasks()
        self._pause: asyncio.TimerHandle | None = None
        self._warn_s = 0.0  # when a full system is worth another warning
        self._start()

    def _start(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                if time.monotonic() > self._warn_s:
                    log.warning("new connections wait: %s; raise `ulimit -n`", e.strerror)
                    self._warn_s = time.monotonic() + WARN_EVERY_S
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(FULL_S, self._start)
                return
            accepted.setblocking(False)
            self._opening.start(self._loop.connect_accepted_socket(self._server, accepted))

    async def stop(self) -> None:
        """Accept no more connections. The accepted ones are open then."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for _ in range(2):  # their first bytes are read, and their handlers begin
            await asyncio.sleep(0)


async def read_body(request: web.BaseRequest, limits: Limits) -> bytes:
    """Return the body of a request, decompressed. `Limits.body_bytes` is for both forms of a compressed body.

    A client that sends nothing for `Limits.idle_connection_s` is cut off, a slow one is not.

    Raises: RequestError.
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding:
        encoding = encoding_of(encoding)
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    content, parts, size = request.content, [], 0
    length = request.content_length
    if length is not None and length > limits.body_bytes:
        raise _too_large(limits)
    while not content.at_eof():
        try:
            if content.total_bytes > size:  # more has come than was read
                part = content.read_nowait()
            else:
                async with asyncio.timeout(limits.idle_connection_s):
                    part = await content.readany()
        except TimeoutError:
            raise RequestError("the request body did not come in time", kind="timeout", status=408) from None
        except web.RequestPayloadError as e:
            raise RequestError(f"the request body is not valid HTTP: {e}") from e
        parts.append(part)
        size += len(part)
        if size > limits.body_bytes:
            raise _too_large(limits)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if not encoding:
        return body
    body = await asyncio.to_thread(decompress, body, encoding, limits.body_bytes)
    if len(body) > limits.body_bytes:
        raise _too_large(limits)
    return body


def _too_large(limits: Limits) -> RequestError:
    return RequestError(f"the request body is larger than {limits.body_bytes} bytes", kind="too_large")
