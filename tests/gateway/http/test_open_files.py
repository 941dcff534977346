"""More agents than the usual limit of open files allows for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from agentcore_rl_toolkit._servers.process import listen
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.http.server import Listener, Server
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

from ..asking import Start, opened, until
from ..served import Served

PROBE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def test_without_a_descriptor_the_call_fails_and_not_the_server(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=0.3))
    session = await opened(gateway)
    url = urlsplit(session.base_url)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    call = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {session.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = os.dup(0)  # the kernel gives out the lowest
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        writer.write(call.encode())
        output = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert output.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in output
        length = int(output.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert b"ulimit -n" in await reader.readexactly(length)
        assert [(w.total_failures, w.inflight) for w in gateway.router.workers.values()] == [(0, 0)]
        writer.write(call.encode())
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        writer.close()
        with contextlib.suppress(OSError):  # a loop that ends before would leave the socket to the collector
            await writer.wait_closed()


async def test_connections_beyond_the_limit_of_descriptors_wait_for_one(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Also on uvloop, which would close them."""
    gateway = Served(tmp_path, engine, under=("sh", "-c", 'ulimit -n 64; exec "$@"', "sh"))
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        url = urlsplit(await gateway.start())
        connections = [await asyncio.open_connection(url.hostname, url.port) for _ in range(64)]
        await until(lambda: "ulimit -n" in gateway.errors.read_text())
        *idle, (reader, writer) = connections
        writer.write(PROBE)
        assert not any(other.at_eof() for other, _ in idle)
        for _, other in idle:
            other.close()
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    finally:
        for _, writer in connections:
            writer.close()
        gateway.kill()


async def test_connections_for_which_the_queue_has_no_room_are_accepted_later() -> None:
    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="served")

    listening = listen("127.0.0.1", 0)
    listening.listen(1)
    waiting = [socket.socket() for _ in range(12)]
    for each in waiting:
        each.setblocking(False)
        assert each.connect_ex(listening.getsockname()) in (0, errno.EINPROGRESS)
    server = Server(serve, Limits())
    listener = Listener(listening, server)

    async def asked(each: socket.socket) -> bytes:
        reader, writer = await asyncio.open_connection(sock=each)
        writer.write(PROBE)
        reply = await reader.read()
        writer.close()
        return reply

    async with asyncio.timeout(60):
        replies = await asyncio.gather(*map(asked, waiting))
    await listener.stop()
    await server.shutdown(1)
    assert all(reply.endswith(b"served") for reply in replies)
