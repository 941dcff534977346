"""Long replies of known length: read past the parser, to the last byte and not one more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle

from ..asking import Start, asked, asked_by, captured, opened, talking, until
from ..asking import ask as post


class Server:
    """Answers each request with a reply of `size` characters, in slices; `how` is what goes wrong at its end."""

    def __init__(self) -> None:
        self.size = 300_000
        self.slices = 7
        self.how = ""
        self.connections = self.answers = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            await asked_by(reader)
            self.answers += 1
            await self.answer(writer)

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
async def server(start_gateway: Start) -> AsyncIterator[tuple[Server, Gateway, SessionHandle]]:
    scripted = Server()
    async with talking(scripted.talk) as url:
        gateway = await start_gateway(url)
        yield scripted, gateway, await opened(gateway)


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


async def has_read_all(gateway: Gateway) -> bool:
    """Give the gateway time to read what has reached it. Returns True if all its calls have ended."""
    reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
    for _ in range(5):  # the gateway reads from its other connections between two requests of one connection
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        health = json.loads(await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0])))
    writer.close()
    return bool(health["in_flight"] == 0)


class LongStream:
    """Answers each request with `size` large events; `sent` counts those that the gateway had time to read."""

    def __init__(self) -> None:
        self.size = self.sent = 1
        self.gateway: Any = None

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        choice = {"index": 0, "token_ids": [1], "logprobs": {"content": [{"token": "x", "logprob": -0.5}]}}
        choice |= {"delta": {"content": "x" * 240_000}}  # less than one read of the gateway's
        event = b"data: %b\n\n" % json.dumps({"id": "r", "prompt_token_ids": [7], "choices": [choice]}).encode()
        end = b'data: {"id":"r","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        while True:
            await asked_by(reader)
            size, self.sent = self.size, 0
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (size * len(event) + len(end)))
            while self.sent < size:
                self.sent += 1
                writer.write(event if self.sent < size else event + end)
                await writer.drain()
                await has_read_all(self.gateway)

    async def until_it_waits(self) -> bool:
        """Return when the gateway reads no more: True if the call has ended, False if it waits for the agent."""
        before = -1
        await until(lambda: self.sent)
        while not (whole := await has_read_all(self.gateway)) and self.sent != before:
            before = self.sent
        return whole


async def test_a_connection_serves_the_next_call_after_a_slow_agent(start_gateway: Start) -> None:
    """The agent reads when the gateway reads no more. A search finds the longest reply that the gateway reads whole before that:
    its last bytes are those that make the gateway wait for the agent.
    """
    engine = LongStream()
    async with talking(engine.talk) as url:
        engine.gateway = gateway = await start_gateway(url)
        session = await opened(gateway)
        low, high = 4, 64
        while high - low > 1:
            engine.size, engine.sent = size, _ = (low + high) // 2, 0
            reader, writer = await asked(session, headers={"connection": "close"}, stream=True, reads=False)
            low, high = (size, high) if await engine.until_it_waits() else (low, size)
            writer.transport.resume_reading()
            async with asyncio.timeout(60):
                assert (await reader.read()).endswith(b"\r\n0\r\n\r\n")
            writer.close()
            engine.size = 1
            async with asyncio.timeout(20):
                assert (await post(session, stream=True))[0] == 200


async def test_an_engine_waits_for_a_slow_agent_that_asked_again_too(start_gateway: Start) -> None:
    engine = LongStream()
    async with talking(engine.talk) as url:
        engine.gateway = gateway = await start_gateway(url)
        session = await opened(gateway)
        engine.size = 60
        connections = []
        for _ in range(2):
            connections.append(await asked(session, headers={"idempotency-key": "k"}, stream=True, reads=False))
            assert not await engine.until_it_waits()
            assert engine.sent < engine.size
        for _, writer in connections:
            writer.transport.abort()
