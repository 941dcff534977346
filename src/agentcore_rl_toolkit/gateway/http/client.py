"""A small HTTP/1.1 client over asyncio streams: one connection per request, whole or streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ...errors import ConfigError, GatewayError
from ...messages.errors import NOT_JSON


async def request(
    method: str, url: str, *, body: Any = None, key: str | None = None, timeout_s: float | None = 30.0
) -> tuple[int, bytes]:
    """Status and body. Raises: GatewayError when the gateway cannot be reached or does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s), _Exchange(method, url, body, key) as exchange:
            return exchange.status, b"".join([piece async for piece in exchange.pieces()])
    except TimeoutError as e:
        raise GatewayError(f"{method} {url}: no answer within {timeout_s} s") from e


async def stream(
    method: str, url: str, *, body: Any = None, key: str | None = None, timeout_s: float | None = 30.0
) -> AsyncIterator[bytes]:
    """The body piece by piece;

    ``timeout_s`` bounds the wait for each. Raises: GatewayError, also on a status of 400 and above.
    """
    try:
        async with _Exchange(method, url, body, key, timeout_s) as exchange:
            pieces = exchange.pieces()
            if exchange.status >= 400:
                text = b"".join([piece async for piece in pieces])
                raise GatewayError(f"{method} {url}: {error_message(text)}", status=exchange.status)
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                yield piece
    except TimeoutError as e:
        raise GatewayError(f"{method} {url}: nothing for {timeout_s} s") from e


def error_message(data: bytes) -> str:
    """What an error's body says."""
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (*NOT_JSON, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")


class _Exchange:
    """One request and its answer."""

    def __init__(self, method: str, url: str, body: Any, key: str | None, head_timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an http(s) URL")
        self._url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        data = b"" if body is None else msgspec.json.encode(body)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        lines = [f"{method} {target} HTTP/1.1", f"host: {shown}:{self._port}", "connection: close"]
        if key is not None:
            lines.append(f"authorization: Bearer {key}")
        if data or method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(data)}"]
        self._request = ("\r\n".join(lines) + "\r\n\r\n").encode() + data
        self._head_timeout_s = head_timeout_s
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0
        self._headers: dict[str, str] = {}

    async def __aenter__(self) -> _Exchange:
        try:
            async with asyncio.timeout(self._head_timeout_s):
                self._reader, self._writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=2**20
                )
                self._writer.write(self._request)
                await self._writer.drain()
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                self.status = int(head[0].split(" ", 2)[1])
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError, ValueError) as e:
            await self.__aexit__()
            if isinstance(e, TimeoutError):
                raise
            raise GatewayError(f"nothing answers at {self._url}: {e}") from e
        except asyncio.CancelledError:  # a time limit around us, say
            if self._writer is not None:
                self._writer.close()
            raise
        self._headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await self._writer.wait_closed()

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            if "chunked" in self._headers.get("transfer-encoding", ""):
                while size := int((await self._reader.readline()).split(b";")[0] or b"-", 16):
                    yield await self._reader.readexactly(size)
                    await self._reader.readexactly(2)
                await self._reader.readline()
                return
            left = int(self._headers.get("content-length", "0"))
            while left:
                piece = await self._reader.read(min(left, 2**18))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(piece)
                yield piece
        except (OSError, asyncio.IncompleteReadError, ValueError) as e:
            if isinstance(e, TimeoutError):
                raise
            raise GatewayError(f"the answer of {self._url} broke off: {e}") from e
