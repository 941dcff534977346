"""HTTP/1.1 to a session's server: one connection for each request, h11 on asyncio's streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import h11

from ..wire import Headers
from .place import Streams

HEAD_BYTES = 64 * 1024  # limit of a reply's headers. One read may exceed it.
READ_BYTES = 64 * 1024
BROKEN = "the agent closed the connection before its reply was complete"


class UpstreamLostError(Exception):
    """The session's server cannot be reached, or closed the connection before its reply was complete."""


class Reply:
    """The reply to a request, as `request` opens it. Every method raises UpstreamLostError when it breaks off."""

    status = 0
    headers: Headers

    def __init__(self, http: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._http, self._reader = http, reader

    async def read_head(self) -> None:
        """Wait for status and headers."""
        while not isinstance(event := await self._event(), h11.Response):
            continue  # interim replies
        self.status, self.headers = event.status_code, list(event.headers)

    async def read(self) -> bytes:
        """Read more of the body. At its end the result is empty."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def whole(self, most_bytes: int) -> bytes:
        """Read the rest of the body. Raises: UpstreamLostError if it is larger, too."""
        found = b""
        while data := await self.read():
            found += data
            if len(found) > most_bytes:
                raise UpstreamLostError(f"the reply has more than {most_bytes} bytes")
        return found

    async def _event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(READ_BYTES))
                    continue
            except (OSError, h11.RemoteProtocolError) as e:
                raise UpstreamLostError(f"{BROKEN}: {e}") from e
            if isinstance(event, h11.ConnectionClosed):
                raise UpstreamLostError(BROKEN)
            return event


@contextlib.asynccontextmanager
async def request(
    dial: Callable[[], Awaitable[Streams]], method: bytes, path: bytes, headers: Headers, body: bytes = b""
) -> AsyncIterator[Reply]:
    """Connect, send a request, and wait for the head of the reply. The block reads the rest. Raises: UpstreamLostError."""
    try:
        reader, writer = await dial()
    except OSError as e:
        raise UpstreamLostError(f"cannot connect to the session's server: {e}") from e
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
    own = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
    with contextlib.closing(writer):
        try:
            for event in (
                h11.Request(method=method, target=path, headers=[*own, *headers]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                writer.write(http.send(event) or b"")
            await writer.drain()
        except (OSError, h11.LocalProtocolError) as e:
            raise UpstreamLostError(f"the agent closed the connection while the payload was sent: {e}") from e
        reply = Reply(http, reader)
        await reply.read_head()
        yield reply


def header(headers: Headers, name: bytes) -> bytes | None:
    """Return the first value of a header (lower-case name), or None."""
    return next((value for key, value in headers if key == name), None)
