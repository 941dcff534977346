"""Small requests of the gateway's own to an inference server (model lists, weight and abort calls), over the same
connection pool.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .pool import UpstreamConnection

if TYPE_CHECKING:
    from .router import Worker


MOST_BYTES = 64 * 2**20  # the token ids of the longest prompt that an agent may send


class TooLongError(OSError):
    """The reply is longer than any that is asked for here."""


class _Whole:
    """Reader of one reply, whole."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def on_data(self, pieces: list[bytes]) -> None:
        if self.done.done():
            return
        self._parts += pieces
        self._size += sum(map(len, pieces))
        if self._size > MOST_BYTES:
            self._parts.clear()
            self.done.set_exception(TooLongError(f"the inference server's reply is larger than {MOST_BYTES} bytes"))

    def on_complete(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    def on_lost(self, error: Exception | None, *, reused: bool, began: bool) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the connection broke: {error or 'closed by the server'}"))


async def get(worker: Worker, path: bytes, *, timeout_s: float) -> tuple[int, bytes]:
    """GET a path. Raises: OSError, TimeoutError."""
    return await _ask(worker, b"GET", path, b"", timeout_s)


async def post(worker: Worker, path: bytes, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
    """POST JSON to a path. Raises: OSError, TimeoutError."""
    return await _ask(worker, b"POST", path, body, timeout_s)


async def _ask(worker: Worker, method: bytes, path: bytes, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    config = worker.config
    lines = [b"%b %b HTTP/1.1" % (method, config.path(path)), b"host: " + worker.host_header]
    if config.api_key is not None:
        lines.append(b"authorization: Bearer " + config.api_key.encode())
    if method == b"POST":
        lines += [b"content-type: application/json", b"content-length: %d" % len(body)]
    request = b"\r\n".join(lines) + b"\r\n\r\n" + body
    async with asyncio.timeout(timeout_s):
        while True:
            connection = worker.pool.take()
            fresh = connection is None
            if connection is None:
                connection = await _connect(worker)
            reader = _Whole()
            connection.send(reader, request)
            try:
                return await reader.done
            except ConnectionError:
                if fresh:
                    raise
            except (asyncio.CancelledError, TooLongError):
                connection.abort()
                raise


async def _connect(worker: Worker) -> UpstreamConnection:
    ready: asyncio.Future[UpstreamConnection] = asyncio.get_running_loop().create_future()

    def take(connection: UpstreamConnection | None, error: OSError | None) -> None:
        if ready.done():
            if connection is not None:
                worker.pool.give(connection)
        elif connection is not None:
            ready.set_result(connection)
        else:
            ready.set_exception(error or ConnectionError("no connection"))

    call_off = worker.pool.connect(take)
    try:
        return await ready
    finally:
        call_off()
