"""More agents than the usual limit of open files allows for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
from urllib.parse import urlsplit

from agentcore_rl_toolkit.gateway.config import Limits
from scripted_engine import ScriptedEngine

from ..asking import Start, opened


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


async def test_a_new_client_waits_until_there_is_a_descriptor(engine: ScriptedEngine, start_gateway: Start) -> None:
    gateway = await start_gateway(engine)
    url, loop = urlsplit(gateway.url), asyncio.get_running_loop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        client.setblocking(False)
        try:
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            await loop.sock_connect(client, (url.hostname, url.port))
            await loop.sock_sendall(client, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            for _ in range(5):  # the gateway tries to take the connection
                await asyncio.sleep(0)
            assert len(gateway.connections) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await asyncio.wait_for(loop.sock_recv(client, 100), 10)).startswith(b"HTTP/1.1 200")
