"""Just enough of an HTTP/1.1 server for a service in tests: bodies with a length, kept-alive connections, broken replies on
request.

Heads, bodies and their times are bounded, and Host and Origin are checked, as on every server of ours. On the loopback it answers
this user and root only."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..._servers.callers import stranger
from ..._servers.connection_room import ConnectionRoom, default_limit
from ..._servers.host_check import HostCheck, Refusal, is_loopback
from ..._servers.process import stop_listening

HEADER_BYTES = 64 * 2**10
BODY_BYTES = 2**30  # a batch of long sequences with logprobs
HEAD_S = 30.0
IDLE_S = 120.0
BODY_S = 60.0  # the longest pause within a body
PIECE = 2**20
JSON = "application/json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request. `headers` have lower-case names."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One reply. `drop_after` breaks the connection after so many bytes of the body; 0: before the head."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    drop_after: int | None = None


class _Connection:
    """One client's, as `ConnectionRoom` looks at it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.transport = writer.transport
        self.address: str = (writer.get_extra_info("peername") or ("",))[0]
        self.used = False
        self.idle_since: float | None = asyncio.get_running_loop().time()


class Listener:
    """Serves `answer` on a loopback port until `stop`."""

    def __init__(self, answer: Callable[[Asked], Awaitable[Answer]]) -> None:
        self.url = ""
        self._answer = answer
        self._hosts = HostCheck()
        self._own_only = True
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[_Connection] = set()
        self._room = ConnectionRoom(default_limit())

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._hosts = HostCheck((host,))
        self._own_only = is_loopback(host)
        self._server = await asyncio.start_server(self._serve, host, port, backlog=1024, limit=HEADER_BYTES)
        bound = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{host}:{bound}"

    async def stop(self) -> None:
        """Stop at once; requests that are being answered lose their connection."""
        if self._server is not None:
            await stop_listening(self._server)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        connection = _Connection(writer)
        self._open.add(connection)
        if self._room.opened(connection.address) or len(self._open) > self._room.limit:
            for each in self._room.make_room(connection, self._open, asyncio.get_running_loop().time()):
                each.transport.abort()
        try:
            while await self._one(reader, writer, connection):
                pass
        except (ConnectionError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except _RefusedError as e:
            await _refuse(writer, e.refusal)
        finally:
            self._open.discard(connection)
            self._room.closed(connection.address)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection) -> bool:
        connection.idle_since = asyncio.get_running_loop().time()
        async with asyncio.timeout(IDLE_S):
            begun = await reader.readexactly(1)
        try:
            async with asyncio.timeout(HEAD_S):
                head = begun + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _RefusedError(Refusal(431, f"the headers may have {HEADER_BYTES} bytes together")) from None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        host, origin = (headers[n].encode("latin-1") if n in headers else None for n in ("host", "origin"))
        refusal = self._hosts.refusal(host, origin) or self._stranger(writer)
        if refusal is not None:
            raise _RefusedError(refusal)
        connection.idle_since, connection.used = None, True
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._body(reader, headers)
        answer = await self._answer(Asked(method=method, path=urlsplit(target).path, headers=headers, body=body))
        if answer.drop_after == 0:
            return False
        reason = http.HTTPStatus(answer.status).phrase
        extra = "".join(f"{k}: {v}\r\n" for k, v in answer.headers)
        writer.write(
            f"HTTP/1.1 {answer.status} {reason}\r\ncontent-type: {answer.content_type}\r\n{extra}"
            f"content-length: {len(answer.body)}\r\n\r\n".encode()
        )
        writer.write(answer.body if answer.drop_after is None else answer.body[: answer.drop_after])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if answer.drop_after is not None:
            await asyncio.sleep(0.01)  # so that what was written arrives before the reset
            return False
        return headers.get("connection", "").lower() != "close"

    def _stranger(self, writer: asyncio.StreamWriter) -> Refusal | None:
        client, server = (writer.get_extra_info(name) for name in ("peername", "sockname"))
        reason = stranger(client[:2], server[:2]) if self._own_only and client else None
        return None if reason is None else Refusal(403, f"this service is not open to {reason}")

    @staticmethod
    async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        parts: list[bytes] = []
        if "chunked" not in headers.get("transfer-encoding", ""):
            await _take(reader, int(headers.get("content-length", "0")), parts)
            return b"".join(parts)
        while size := int((await _line(reader)).split(b";")[0], 16):
            await _take(reader, size, parts)
            await _line(reader)
        await _line(reader)
        return b"".join(parts)


class _RefusedError(Exception):
    """A request that gets no answer but this one."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


async def _take(reader: asyncio.StreamReader, size: int, parts: list[bytes]) -> None:
    """Read so much of a body, with a limit to each pause. Raises: _RefusedError above the limit of a body."""
    if size < 0 or size + sum(map(len, parts)) > BODY_BYTES:
        raise _RefusedError(Refusal(413, f"a body may have {BODY_BYTES} bytes"))
    while size:
        async with asyncio.timeout(BODY_S):
            piece = await reader.read(min(size, PIECE))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size)
        parts.append(piece)
        size -= len(piece)


async def _line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(BODY_S):
        return await reader.readline()


async def _refuse(writer: asyncio.StreamWriter, refusal: Refusal) -> None:
    body = json.dumps({"error": refusal.message}).encode()
    line = f"HTTP/1.1 {refusal.status} {http.HTTPStatus(refusal.status).phrase}\r\ncontent-type: {JSON}\r\n"
    writer.write(f"{line}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(BODY_S):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
