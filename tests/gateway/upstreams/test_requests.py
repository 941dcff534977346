"""Small requests of the gateway's own to an inference server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import httpx
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.upstreams import requests

Start = Callable[..., Awaitable[Gateway]]


async def test_a_list_of_models_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_BYTES", 2**20)
    hung_up = asyncio.Event()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" " * 2**16)
                await writer.drain()
        hung_up.set()
        writer.close()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=url, engine="vllm"),)))
    await gateway.start()
    try:
        [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, timeout=60) as http:
            answer = await http.get(session.base_url + "/models")
        assert answer.status_code == 502
        await asyncio.wait_for(hung_up.wait(), 30)
    finally:
        server.close()
        await gateway.stop(grace_s=0.2)
