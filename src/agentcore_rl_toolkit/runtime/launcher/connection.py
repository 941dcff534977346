"""HTTP/1.1 to a session's server: one connection for each request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import httpcore

from ..wire import Headers
from .place import Stream

_ORIGIN = httpcore.Origin(b"http", b"localhost", 80)


class UpstreamLostError(Exception):
    """The session's server cannot be reached, or closed the connection before its reply was complete."""


@contextlib.asynccontextmanager
async def open_request(
    dial: Callable[[], Awaitable[Stream]], method: bytes, path: bytes, headers: Headers, body: bytes = b""
) -> AsyncIterator[httpcore.Response]:
    """Connect, send a request, and wait for the head of the reply. The block reads the rest. Raises: UpstreamLostError."""
    url = httpcore.URL(scheme=_ORIGIN.scheme, host=_ORIGIN.host, port=_ORIGIN.port, target=path)
    sent = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body)), *headers]
    try:
        async with httpcore.AsyncHTTP11Connection(_ORIGIN, await dial()) as connection:
            reply = await connection.handle_async_request(httpcore.Request(method, url, headers=sent, content=body))
            reply.headers = [(name.lower(), value) for name, value in reply.headers]
            yield reply
    except httpcore.ConnectError as e:
        raise UpstreamLostError(f"cannot connect to the session's server: {e}") from e
    except (httpcore.NetworkError, httpcore.ProtocolError) as e:
        raise UpstreamLostError(f"the agent closed the connection before its reply was complete: {e}") from e


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header (lower-case name), or None."""
    return next((value for key, value in headers if key == name), None)
