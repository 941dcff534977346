"""aiohttp's server with the parts that it lacks: an end to stalled readers, and errors in JSON.

A handler is a task of its connection: aiohttp cancels it when the client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from ..._servers.tasks import Tasks
from ...messages.errors import RequestError
from ..config import Limits
from .compression import ACCEPTED, decompress
from .responses import error_response

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.1  # pause after an attempt without a free file descriptor
STALLED_S = 60  # a client that reads nothing of its reply for this long is cut off

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def keep_alive(sock: socket.socket) -> None:
    """Let the system detect a dead peer within two minutes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Connection(web.RequestHandler):
    """A client connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sock = transport.get_extra_info("socket")
        keep_alive(sock)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux ends the connection of a client that reads nothing
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * STALLED_S)
        transport.set_write_buffer_limits(high=0)  # type: ignore[attr-defined]  # drained: the system has all of it
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the error for a request that is not valid HTTP or at which a handler failed. It ends the connection."""
        if isinstance(exc, ConnectionError) or request.writer.output_size:
            raise ConnectionResetError("the client disconnected, or has a part of the reply") from exc
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

    async def accept(self, listening: socket.socket) -> None:
        """Take every connection that waits, until this is cancelled.

        libuv (1.45 and later) takes one per pass of the event loop: a new client would wait for the calls of all others.
        """
        loop, opening = asyncio.get_running_loop(), Tasks()
        listening.setblocking(False)
        try:
            while True:
                try:
                    accepted, _ = listening.accept()
                except BlockingIOError:
                    await _readable(listening)
                except ConnectionError:  # the client has disconnected
                    continue
                except OSError:  # the process has no file descriptor left
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                else:
                    opening.start(loop.connect_accepted_socket(self, accepted))
        finally:
            await asyncio.gather(*opening, return_exceptions=True)


async def _readable(sock: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


async def read_body(request: web.BaseRequest, limits: Limits) -> bytes:
    """Return the body of a request, decompressed. `Limits.body_bytes` bounds it before and after.

    A client that sends nothing for `Limits.idle_connection_s` gets a 408. A slow client does not.
    Raises: RequestError.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower().replace("x-gzip", "gzip")
    if encoding not in ("", "identity", *ACCEPTED):
        raise RequestError(
            f"the content-encoding {encoding[:40]!r} is not accepted; send one of {', '.join(ACCEPTED)}", status=415
        )
    if "expect" in request.headers and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    content, parts, size = request.content, [], 0
    if (request.content_length or 0) > limits.body_bytes:
        raise _too_large(limits)
    while not content.at_eof():
        try:
            if content.total_bytes > size:  # more has arrived than was read
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
    if encoding in ACCEPTED:
        body = await asyncio.to_thread(decompress, body, encoding, limits.body_bytes)
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
    return body


def _too_large(limits: Limits) -> RequestError:
    return RequestError(f"the request body is larger than {limits.body_bytes} bytes", kind="too_large")
