"""Requests that are passed on to another server: HTTP/1.1 with h11 on asyncio's streams, one connection for each request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.responses import JSONResponse, Response

from ...errors import text_of

CONNECT_S = 10.0
HEAD_BYTES = 64 * 1024  # limit of a reply's headers
READ_BYTES = 64 * 1024
# Of the connection, not of the message. Without `accept-encoding` replies are not compressed.
NOT_PASSED = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"accept-encoding"),
    )
)
Headers = Sequence[tuple[bytes, bytes]]


class Forwarded(Response):
    """The reply of another server to this request, passed on as it arrives. If the caller disconnects, the connection is closed.

    Any failure before the head of the reply is a 502 whose text begins with ``failure``. A later one is raised, so that the
    caller's connection breaks, too.
    """

    def __init__(self, method: str, url: str, headers: Headers, body: bytes, failure: str) -> None:
        self._asked = method, url, [(k, v) for k, v in headers if k.lower() not in NOT_PASSED], body
        self._failure = failure
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response, and stop when the client disconnects."""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue

        tasks = asyncio.create_task(self._pass_on(scope, receive, send)), asyncio.create_task(gone())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False
        try:
            async with opened(*self._asked) as (head, parts):
                kept = [(k, v) for k, v in head.headers if k == b"content-length" or k not in NOT_PASSED]
                begun = True
                await send({"type": "http.response.start", "status": head.status_code, "headers": kept})
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except Exception as e:
            if begun:
                raise
            message = f"{self._failure}: {text_of(e) or type(e).__name__}"
            refusal = JSONResponse({"error": {"message": message, "type": "relay"}, "message": message}, 502)
            await refusal(scope, receive, send)


@contextlib.asynccontextmanager
async def opened(
    method: str, url: str, headers: Headers = (), body: bytes = b""
) -> AsyncIterator[tuple[h11.Response, AsyncIterator[bytes]]]:
    """Send a request and wait for the head of its reply. Gives it, and the parts of the body as they come.

    Raises: OSError, TimeoutError, ValueError for an address that is none, h11.ProtocolError.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{parts.scheme}://{parts.hostname} is no address of a server")
    secure = _trust() if parts.scheme == "https" else None
    async with asyncio.timeout(CONNECT_S):
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
    try:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        host, path = parts.netloc.rpartition("@")[2], (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        own = [(b"host", host.encode()), (b"content-length", b"%d" % len(body))]
        writer.write(http.send(h11.Request(method=method, target=path, headers=[*own, *headers])) or b"")
        writer.write((http.send(h11.Data(data=body)) or b"") + (http.send(h11.EndOfMessage()) or b""))
        with contextlib.suppress(ConnectionError):  # a server may answer before it has read all
            await writer.drain()

        async def event() -> Any:
            while (found := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(READ_BYTES))
            return found

        async def rest() -> AsyncIterator[bytes]:
            while isinstance(found := await event(), h11.Data):
                yield bytes(found.data)

        while not isinstance(head := await event(), h11.Response):
            if isinstance(head, h11.ConnectionClosed):
                raise ConnectionError("the connection was closed before a reply")
        yield head, rest()
    finally:
        writer.transport.abort()


@functools.cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()
