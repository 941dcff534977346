"""uvicorn's HTTP protocol with one addition: the application can break a connection off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_KEY = "agentcore_rl.transport"


class RuntimeProtocol(HttpToolsProtocol):
    """Puts the transport into the scope. ASGI itself has no way to end a connection without a reply."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[_KEY] = self.transport  # type: ignore[literal-required]  # an addition to the specification's keys


async def break_off(scope: Mapping[str, Any]) -> None:
    """Reset the caller's connection and wait until uvicorn knows it."""
    transport = scope.get(_KEY)
    if transport is None:
        raise ConnectionResetError("the connection is to be broken off")
    transport.abort()
    while not transport.is_closing():  # noqa: ASYNC110  # the transport has a flag, no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)  # connection_lost is called from the loop, after which uvicorn expects no reply
