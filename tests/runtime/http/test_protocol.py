"""A short reply wakes its caller once."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import uvicorn

from agentcore_rl_toolkit._servers.bounded_http import Bounds
from agentcore_rl_toolkit.runtime.http.protocol import RuntimeProtocol, send_whole


async def application(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"5")]
    if scope["path"] == "/whole":
        await send_whole(scope, send, 200, headers, b"hello")
        return
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await asyncio.sleep(0.05)
    await send({"type": "http.response.body", "body": b"hello"})


class Caller(asyncio.Protocol):
    """Keeps what arrives, read by read."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.whole = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.reads.append(data)
        if b"".join(self.reads).endswith(b"hello"):
            self.whole.set()


async def test_head_and_body_of_a_complete_reply_are_one_write_and_of_others_are_not_held_back() -> None:
    options: dict[str, Any] = {
        "http": functools.partial(RuntimeProtocol, bounds=Bounds()),
        "lifespan": "off",
        "log_level": "warning",
        "port": 0,
    }
    server = uvicorn.Server(uvicorn.Config(application, **options))
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, no event
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            for path, reads in (("/whole", 1), ("/apart", 2), ("/whole", 1)):
                transport, caller = await asyncio.get_running_loop().create_connection(Caller, "127.0.0.1", port)
                transport.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
                await caller.whole.wait()
                assert len(caller.reads) == reads
                transport.close()
    finally:
        server.should_exit = True
        await serving
