"""A listener on loopback that agents on this machine tell when they are done.

One POST per rollout to a URL that nobody can guess. What it says is not believed: it only makes the client look at the
store at once. Web pages are refused by Host and Origin, and of connections that say nothing the oldest make room for others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from urllib.parse import quote, unquote, urlsplit

from ..._servers.connection_room import default_limit
from ..._servers.host_check import HostCheck
from ..._servers.process import bind, stop_listening

MAX_REQUEST_BYTES = 64 * 1024  # a notification is a few hundred bytes
IDLE_S = 10.0
_NO_CONTENT = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
_REFUSED = b"HTTP/1.1 %d Refused\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class PushListener:
    """Listens on 127.0.0.1; calls ``on_push(session_id)`` for each notification. Lives on the engine's loop."""

    def __init__(self, on_push: Callable[[str], object]) -> None:
        self._on_push = on_push
        self._token = secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._base = ""
        self._open: dict[asyncio.Transport, None] = {}  # oldest first; each ends with its request
        self.received = 0

    async def start(self) -> None:
        """Listen on a free port. Further calls do nothing."""
        if self._base:
            return
        async with self._starting:  # who comes meanwhile waits behind the first, and stays behind it in the queue
            if self._server is None:
                # Listening begins once `close` can find it: cancelled in the middle of create_server, nobody would have it.
                self._server = await asyncio.get_running_loop().create_server(
                    lambda: _Connection(self.take, self._open),
                    sock=bind("127.0.0.1", 0),
                    backlog=1024,
                    start_serving=False,
                )
            if not self._base:
                await self._server.start_serving()
                port = self._server.sockets[0].getsockname()[1]
                self._base = f"http://127.0.0.1:{port}/{self._token}/"

    def url_for(self, session_id: str) -> str:
        """Where the agent of a session reports; empty before `start`."""
        return self._base + quote(session_id, safe="") if self._base else ""

    def take(self, target: str) -> bool:
        """Handle one request line's target; False when it is none of ours."""
        token, _, session_id = urlsplit(target).path.strip("/").partition("/")
        if not session_id or not secrets.compare_digest(token.encode(), self._token.encode()):
            return False
        self.received += 1
        self._on_push(unquote(session_id))
        return True

    async def close(self) -> None:
        """Stop listening, and hang up on whoever is in the middle of a request."""
        if self._server is not None:
            await stop_listening(self._server)
        for transport in list(self._open):
            transport.abort()


def read_request(data: bytes) -> tuple[str, int, dict[bytes, bytes]] | None:
    """Target, full length and headers of the HTTP request that `data` begins with; None while its head is incomplete.

    Raises: ValueError when it is not an HTTP request with a readable length.
    """
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end:
        return None
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        raise ValueError("not an HTTP request")
    pairs = (line.partition(b":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    length = int(headers.get(b"content-length", b"0"))
    if length < 0:
        raise ValueError("negative length")
    return parts[1].decode("ascii"), len(head) + 4 + length, headers


class _Connection(asyncio.Protocol):
    _hosts = HostCheck()

    def __init__(self, take: Callable[[str], bool], everyone: dict[asyncio.Transport, None]) -> None:
        self._take = take
        self._everyone = everyone
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._everyone[transport] = None
        if len(self._everyone) > default_limit():
            next(iter(self._everyone)).abort()
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._everyone.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._data += data
        try:
            request = read_request(self._data)
        except ValueError:
            transport.abort()
            return
        if len(self._data) > MAX_REQUEST_BYTES:
            transport.write(_TOO_LARGE)
            transport.close()
            return
        if request is None or len(self._data) < request[1]:
            return
        refusal = self._hosts.refusal(request[2].get(b"host"), request[2].get(b"origin"))
        if refusal is not None:
            why = refusal.message.encode()
            transport.write(_REFUSED % (refusal.status, len(why), why))
            transport.close()
            return
        transport.write(_NO_CONTENT if self._take(request[0]) else _NOT_FOUND)
        transport.close()
