"""The trainer's client, its plain face, and servers that are no gateway."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice

import pytest

from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient

Serve = Callable[[bytes], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start servers that answer whatever they are asked with these bytes, and then hang up (or wait, on none)."""
    servers: list[asyncio.Server] = []
    writers: list[asyncio.StreamWriter] = []

    async def start(answer: bytes) -> str:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await reader.readuntil(b"\r\n\r\n")
            if answer:
                writer.write(answer)
                writer.close()

        servers.append(await asyncio.start_server(talk, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
    for writer in writers:
        writer.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n<htm>",
        b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{",
        b"x" * 2_000_000,
    ],
)
async def test_what_is_no_gateway_is_said_and_not_a_traceback(serve: Serve, answer: bytes) -> None:
    client = GatewayClient(await serve(answer), timeout_s=5)
    with pytest.raises(GatewayError):
        await client.health_async()


async def test_a_gateway_that_does_not_answer_in_time_leaves_no_connection_behind(serve: Serve) -> None:
    client = GatewayClient(await serve(b""), timeout_s=0.1)
    with pytest.raises(GatewayError, match="no answer within"):
        await client.stats_async()
    gc.collect()  # an unclosed connection would be a warning here, and warnings are errors


async def test_finished_sessions_come_in_a_plain_loop(client: GatewayClient) -> None:
    names = [f"session-{i}" for i in range(4)]
    await client.create_sessions_async(names)
    await client.close_sessions_async(names[:3])
    found = await asyncio.to_thread(lambda: [c.session_id for c in islice(client.stream_finished(), 3)])
    assert found == names[:3]
    _, place = await client.finished_async(wait_s=0)
    await client.close_sessions_async(names[3:])
    found = await asyncio.to_thread(lambda: [c.session_id for c in islice(client.stream_finished(after=place), 1)])
    assert found == names[3:]


@pytest.mark.parametrize("name", [n for n in vars(GatewayClient) if f"{n}_async" in vars(GatewayClient)])
def test_both_faces_of_the_client_take_the_same(name: str) -> None:
    plain, waits = (inspect.signature(getattr(GatewayClient, n)).parameters for n in (name, f"{name}_async"))
    named = [p for p in plain.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert named == list(waits.values())[: None if len(named) == len(plain) else len(named)]
