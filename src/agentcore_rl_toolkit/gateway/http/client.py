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
        async with asyncio.timeout(timeout_s), _exchange(method, url, body, key) as (status, pieces):
            return status, b"".join([piece async for piece in pieces])
    except TimeoutError as e:
        raise GatewayError(f"{method} {url}: no answer within {timeout_s} s") from e


async def stream(
    method: str, url: str, *, body: Any = None, key: str | None = None, timeout_s: float | None = 30.0
) -> AsyncIterator[bytes]:
    """The body piece by piece;

    ``timeout_s`` bounds the wait for each. Raises: GatewayError, also on a status of 400 and above.
    """
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(timeout_s):
                status, pieces = await stack.enter_async_context(_exchange(method, url, body, key))
                if status >= 400:
                    text = b"".join([piece async for piece in pieces])
                    raise GatewayError(f"{method} {url}: {error_message(text)}", status=status)
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
    """The message in an error's body."""
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (*NOT_JSON, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def _exchange(
    method: str, url: str, body: Any, key: str | None
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """The status of an answer, and its body piece by piece. Raises: GatewayError, TimeoutError of a limit around it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not an http(s) URL")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    host, port = parts.hostname, parts.port or (80 if tls is None else 443)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    data = b"" if body is None else msgspec.json.encode(body)
    shown = f"[{host}]" if ":" in host else host
    lines = [f"{method} {target} HTTP/1.1", f"host: {shown}:{port}", "connection: close"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if data or method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=2**20)
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + data)
        await writer.drain()
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        yield int(first.split(" ", 2)[1]), _pieces(reader, headers)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError, ValueError) as e:
        if isinstance(e, TimeoutError):
            raise
        raise GatewayError(f"{method} {url}: there is no answer, or it broke off: {e}") from e
    finally:
        if writer is not None:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).split(b";")[0] or b"-", 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
        return
    left = int(headers.get("content-length", "0"))
    while left:
        piece = await reader.read(min(left, 2**18))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece
