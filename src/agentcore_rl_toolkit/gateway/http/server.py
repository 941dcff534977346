"""aiohttp's server with the parts that it lacks: an end to stalled readers, and errors in JSON.

A handler is a task of its connection: aiohttp cancels it when the client goes away.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ...messages.errors import RequestError
from ..config import Limits
from .compression import decompress, encoding_of
from .responses import error_response

log = logging.getLogger(__name__)

STALLED_S = 60.0  # an agent that reads nothing of its reply for this long is gone

_SIGNED = b"AWS4-HMAC-SHA256 Credential="

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Request:
    """One request of an agent or a trainer. ``path`` is as it was sent: ids contain ``/`` and ``%``.

    ``path_key`` is a key that its path has: botocore sends bearer tokens over HTTPS only.
    """

    method: bytes
    path: bytes
    query: bytes
    headers: Mapping[str, str]
    body: bytes = b""
    path_key: bytes = b""

    def _header(self, name: str) -> bytes:
        return self.headers.get(name, "").encode("utf-8", "surrogateescape")

    def has_key(self, key: bytes) -> bool:
        """Return True if one of its credentials is this key. Anthropic's client sends two when its environment has another.

        A request that is signed for AWS has the key as its access key id. The signature is not read.
        """
        authorization, others = self._header("authorization"), map(self._header, ("x-api-key", "x-goog-api-key"))
        bearer = authorization[7:] if authorization[:7].lower() == b"bearer " else authorization
        if authorization.startswith(_SIGNED):
            bearer = authorization.removeprefix(_SIGNED).partition(b"/")[0]
        return any(hmac.compare_digest(shown, key) for shown in (bearer, self.path_key, *others))

    def has_admin_key(self, key: bytes) -> bool:
        """Return True if it carries the administrator's key."""
        if "x-admin-key" in self.headers:
            return hmac.compare_digest(self._header("x-admin-key"), key)
        return self.has_key(key)


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


async def read_body(request: web.BaseRequest, limits: Limits) -> bytes:
    """Return the body of a request, decompressed. `Limits.body_bytes` is for both forms of a compressed body.

    A client that sends nothing for `Limits.idle_connection_s` is cut off, a slow one is not.

    Raises: RequestError.
    """
    encoding = encoding_of(request.headers.get("content-encoding"))
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
