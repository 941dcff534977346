"""Long replies of known length: read past the parser, to the last byte and not one more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, GatewayConfig, SessionHandle, UpstreamConfig

from ..asking import ask as post
from ..asking import captured, opened


class Server:
    """Answers each request with a reply of `size` characters, in slices; `how` is what goes wrong at its end."""

    def __init__(self) -> None:
        self.size = 300_000
        self.slices = 7
        self.how = ""
        self.connections = self.answers = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
                self.answers += 1
                await self.answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter) -> None:
        message = {"role": "assistant", "content": "x" * self.size}
        choice = {"index": 0, "message": message, "token_ids": [1], "finish_reason": "stop"}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5}]}
        body = json.dumps({"id": f"r{self.answers}", "choices": [choice], "prompt_token_ids": [7]}).encode()
        close = b"connection: close\r\n" if self.how == "close" else b""
        data = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n" % (close, len(body))
        data += body
        if self.how == "less":
            data = data[:-10]
        step = len(data) // self.slices + 1
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()
            await asyncio.sleep(0.002)
        if self.how in ("less", "close"):
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Gateway, SessionHandle]]:
    scripted = Server()
    listening = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=f"http://127.0.0.1:{port}", engine="vllm"),)))
    await gateway.start()
    session = await opened(gateway)
    yield scripted, gateway, session
    await gateway.stop(grace_s=0.2)
    listening.close()
    for writer in scripted.writers:
        writer.close()
    await asyncio.sleep(0.01)


async def ask(session: SessionHandle, text: str = "x") -> tuple[int, Any]:
    status, reply = await post(session, text)
    return status, json.loads(reply)


@pytest.mark.parametrize("slices", [1, 7])
async def test_long_replies_come_whole_over_one_connection(
    server: tuple[Server, Gateway, SessionHandle], slices: int
) -> None:
    scripted, gateway, session = server
    scripted.slices = slices
    for turn, size in enumerate([300_000, 90_000, 700_000, 10, 300_000]):
        scripted.size = size
        status, reply = await ask(session, str(turn))
        assert status == 200
        assert reply["id"] == f"r{turn + 1}"
        assert len(reply["choices"][0]["message"]["content"]) == size
    assert scripted.connections == 1
    capture = await captured(gateway, session)
    assert len(capture.turns) == 5


async def test_a_connection_the_server_closes_is_not_used_again(server: tuple[Server, Gateway, SessionHandle]) -> None:
    scripted, _, session = server
    scripted.how = "close"
    for turn in range(3):
        assert (await ask(session, str(turn)))[0] == 200
    assert scripted.connections == 3


async def test_a_long_reply_that_breaks_off_is_no_reply(server: tuple[Server, Gateway, SessionHandle]) -> None:
    scripted, gateway, session = server
    scripted.how = "less"
    status, reply = await ask(session)
    assert status == 502
    assert "before its reply was whole" in reply["error"]["message"]
    assert "127.0.0.1" not in reply["error"]["message"]
    assert scripted.answers == 2  # there is no other server, so this one was asked once more
    capture = await captured(gateway, session)
    assert capture.turns == []
