"""HTTP/1.1 to a session's server: one connection for each request, h11 on asyncio's streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import h11

HEAD_BYTES = 64 * 1024  # of a reply's headers, or as much more as one read brings
READ_BYTES = 64 * 1024

Headers = list[tuple[bytes, bytes]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[Streams]]


class UpstreamLostError(Exception):
    """The session's server closed the connection before its reply was complete, or there is none."""


class Connection:
    """One request to a session's server and its reply, as `request` opens it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: Headers = []
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)

    async def send(self, method: bytes, path: bytes, headers: Headers, body: Sequence[bytes] = ()) -> None:
        """Write the request and wait for the reply's head. Raises: UpstreamLostError."""
        length = b"%d" % sum(map(len, body))
        host = () if any(name == b"host" for name, _ in headers) else ((b"host", b"localhost"),)
        head = h11.Request(method=method, target=path, headers=[*host, (b"content-length", length), *headers])
        try:
            self._write(head)
            for piece in body:
                self._write(h11.Data(data=piece))
                await self._writer.drain()
            self._write(h11.EndOfMessage())
        except (OSError, h11.LocalProtocolError) as e:
            raise UpstreamLostError(f"the agent closed the connection while the payload was sent: {e}") from e
        while not isinstance(event := await self._event(), h11.Response):
            pass  # interim replies
        self.status = event.status_code
        self.headers = list(event.headers)

    async def read(self) -> bytes:
        """More of the reply's body; nothing at its end. Raises: UpstreamLostError when it breaks off."""
        event = await self._event()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def whole(self, most_bytes: int) -> bytes:
        """All of the reply. Raises: UpstreamLostError when it breaks off, or is larger."""
        found = b""
        while data := await self.read():
            found += data
            if len(found) > most_bytes:
                raise UpstreamLostError(f"the reply has more than {most_bytes} bytes")
        return found

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)

    async def _event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(READ_BYTES))
                    continue
            except (OSError, h11.RemoteProtocolError) as e:
                text = "the agent closed the connection before its reply was complete"
                raise UpstreamLostError(f"{text}: {e}") from e
            if isinstance(event, h11.ConnectionClosed):
                raise UpstreamLostError("the agent closed the connection before its reply was complete")
            return event


@contextlib.asynccontextmanager
async def request(
    dial: Dial, method: bytes, path: bytes, headers: Headers, body: Sequence[bytes] = ()
) -> AsyncIterator[Connection]:
    """Connect and send a request; the block reads the reply. Raises: UpstreamLostError."""
    try:
        reader, writer = await dial()
    except OSError as e:
        raise UpstreamLostError(f"cannot connect to the session's server: {e}") from e
    connection = Connection(reader, writer)
    try:
        await connection.send(method, path, headers, body)
        yield connection
    finally:
        connection.close()


def header(headers: Headers, name: bytes) -> bytes | None:
    """First value of a header (lower-case name), or None."""
    return next((value for key, value in headers if key == name), None)
