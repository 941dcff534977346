"""uvicorn's HTTP protocol with two additions: a reply can be one write, and the application can break a connection off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Send = Callable[[dict[str, Any]], Awaitable[None]]
_KEY = "agentcore_rl.transport"


class HoldingTransport:
    """A transport that, when asked to, sends its next write together with the one after it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._hold = False
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold(self) -> None:
        """Keep the next write back until there is another."""
        self._hold = True

    def write(self, data: bytes) -> None:
        if self._hold:
            self._hold, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        if self._held:
            self.write(b"")
        self._transport.close()


class RuntimeProtocol(HttpToolsProtocol):
    """Puts the transport into the scope. ASGI itself has no way to end a connection without a reply."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(HoldingTransport(transport))  # type: ignore[arg-type]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[_KEY] = self.transport  # type: ignore[literal-required]  # an addition to the specification's keys


async def send_whole(
    scope: Mapping[str, Any], send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """Send a complete reply. Head and body are one write: each wakes the caller, most of what a short reply costs."""
    transport = scope.get(_KEY)
    if transport is not None:
        transport.hold()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def break_off(scope: Mapping[str, Any]) -> None:
    """Reset the caller's connection and wait until uvicorn knows it."""
    transport = scope.get(_KEY)
    if transport is None:
        raise ConnectionResetError("the connection is to be broken off")
    transport.abort()
    while not transport.is_closing():  # noqa: ASYNC110  # the transport has a flag, no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)  # connection_lost is called from the loop, after which uvicorn expects no reply
