"""Just enough of an HTTP/1.1 server for a service in tests: bodies with a length, kept-alive connections, broken replies on
request."""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

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


class Listener:
    """Serves `answer` on a loopback port until `stop`."""

    def __init__(self, answer: Callable[[Asked], Awaitable[Answer]]) -> None:
        self.url = ""
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, backlog=1024, limit=2**20)
        bound = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{host}:{bound}"

    async def stop(self) -> None:
        """Stop at once; requests that are being answered lose their connection."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
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

    @staticmethod
    async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", ""):
            return await reader.readexactly(int(headers.get("content-length", "0")))
        parts = []
        while size := int((await reader.readline()).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readline()
        return b"".join(parts)
