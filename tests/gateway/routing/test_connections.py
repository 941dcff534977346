"""Replies that break off, connections that a server closed, and agents that read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle
from agentcore_rl_toolkit.gateway.config import Limits, UpstreamConfig
from agentcore_rl_toolkit.gateway.router import Router
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, asked, asked_by, captured, opened, status_of, talking, until
from ..asking import ask as post


class Server:
    """Answers each request with a reply of `size` characters, in slices. It ``breaks_off`` before the last bytes."""

    def __init__(self) -> None:
        self.size = 300_000
        self.breaks_off = False
        self.answers = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await asked_by(reader)
            self.answers += 1
            await self.answer(writer)

    async def answer(self, writer: asyncio.StreamWriter) -> None:
        message = {"role": "assistant", "content": "x" * self.size}
        choice = {"index": 0, "message": message, "token_ids": [1], "finish_reason": "stop"}
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5}]}
        body = json.dumps({"id": f"r{self.answers}", "choices": [choice], "prompt_token_ids": [7]}).encode()
        data = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        if self.breaks_off:
            data = data[:-10]
        step = len(data) // 7 + 1
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()
            await asyncio.sleep(0.002)
        if self.breaks_off:
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


async def test_a_long_reply_that_breaks_off_is_no_reply(server: tuple[Server, Gateway, SessionHandle]) -> None:
    scripted, gateway, session = server
    scripted.breaks_off = True
    status, reply = await ask(session)
    assert status == 502
    assert "before its reply was whole" in reply["error"]["message"]
    assert "127.0.0.1" not in reply["error"]["message"]
    assert scripted.answers == 2  # there is no other server, so this one was asked once more
    assert [worker.total_failures for worker in gateway.router.workers.values()] == [2]
    capture = await captured(gateway, session)
    assert capture.turns == []


async def test_a_server_that_closed_its_idle_connections_gets_the_call_on_a_new_one(start_gateway: Start) -> None:
    """It is no failure of the server: it has not seen the request."""
    scripted, writers = Server(), []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        scripted.size = 10
        await scripted.talk(reader, writer)

    async with talking(talk) as url:
        gateway = await start_gateway(url)
        session = await opened(gateway)
        assert [status for status, _ in await asyncio.gather(*(ask(session, str(n)) for n in range(3)))] == [200] * 3
        for writer in writers:
            writer.transport.abort()  # the gateway may not have noticed yet
        assert (await ask(session, "again"))[0] == 200
        assert [worker.total_failures for worker in gateway.router.workers.values()] == [0]
        assert gateway.counters["retries"] == 0


async def test_a_busy_gateway_sends_a_call_again_whose_connection_ended_before_it_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.router.STALE_S", 0.1)
    scripted, writers = Server(), []
    scripted.size = 10

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await scripted.talk(reader, writer)

    async def call() -> int:
        reply = await worker.post(b"/v1/chat/completions", b"{}", session="s", stream=False)
        await reply.read()
        return reply.status

    async with talking(talk) as url:
        router = Router([UpstreamConfig(url=url, engine="vllm")], Limits())
        router.start()
        [worker] = router.workers.values()
        assert await call() == 200
        again = asyncio.create_task(call())
        writers[0].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        asyncio.get_running_loop().call_soon(time.sleep, 0.3)  # other work
        assert await again == 200
        await router.close()


async def test_a_call_that_the_server_began_is_not_repeated_on_every_open_connection(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that ends long calls closes the connection. The call is sampled once more, as after each lost reply."""
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.router.STALE_S", 0.1)
    scripted, long_calls = Server(), 0
    scripted.size = 10

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal long_calls
        while True:
            _, body = await asked_by(reader)
            if b"long call" in body:
                long_calls += 1
                await asyncio.sleep(0.2)
                return
            await scripted.answer(writer)

    async with talking(talk) as url:
        gateway = await start_gateway(url)
        session = await opened(gateway)
        assert {status for status, _ in await asyncio.gather(*(ask(session, str(n)) for n in range(8)))} == {200}
        status, reply = await ask(session, "long call")
        assert (status, "before its reply was whole" in reply["error"]["message"]) == (502, True)
        assert long_calls == 2
        assert gateway.counters["retries"] == 1


async def test_a_slow_agent_holds_up_its_own_connection_only(start_gateway: Start) -> None:
    """The engine's reply is read to its end. The agent gets all of it when it reads again, and so does one that comes later."""
    choice: dict[str, Any] = {"index": 0, "token_ids": [1], "logprobs": {"content": [{"token": "x", "logprob": -0.5}]}}
    choice |= {"delta": {"content": "x" * 240_000}}
    event = b"data: %b\n\n" % json.dumps({"id": "r", "prompt_token_ids": [7], "choices": [choice]}).encode()
    end = b'data: {"id":"r","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    sent = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await asked_by(reader)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (60 * len(event) + len(end)))
            for _ in range(60):
                writer.write(event)
                await writer.drain()
            writer.write(end)
            await writer.drain()
            sent.set()

    async with talking(talk) as url:
        gateway = await start_gateway(url)
        session = await opened(gateway)
        headers = {"idempotency-key": "k", "connection": "close"}
        reader, writer = await asked(session, headers=headers, stream=True, reads=False)
        await sent.wait()
        await until(lambda: not gateway.running.calls)
        other, later = await asked(session, headers=headers, stream=True)
        async with asyncio.timeout(60):
            whole = await other.read()
            writer.transport.resume_reading()
            assert (await reader.read()).count(b"xxx") == whole.count(b"xxx") > 1_000_000
        for one in (writer, later):
            one.close()
        [turn] = (await captured(gateway, session)).turns
        assert turn.delivered


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends such connections")
async def test_a_client_that_reads_nothing_is_cut_off(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.http.server.STALLED_S", 1)
    engine.faults.append(Fault(edit=lambda event: {**event, "padding": "x" * 2**22}))
    _, writer = await asked(session, stream=True, reads=False)
    await until(lambda: engine.calls)
    await until(lambda: not gateway.connections)
    writer.close()


async def test_a_slow_reader_holds_back_only_its_own_call(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    """Neither another call of its session, nor one of another session."""
    engine.faults.append(Fault(edit=lambda event: {**event, "padding": "x" * 2**22}))
    reader, writer = await asked(session, headers={"connection": "close"}, stream=True, reads=False)

    def waiting() -> int:
        transports = [connection.transport for connection in gateway.connections.connections]
        return sum(t is not None and t.get_write_buffer_size() > 0 for t in transports)

    await until(waiting)
    for other in (session, await opened(gateway)):
        assert await status_of(other, "another question", stream=True) == 200
    assert waiting() == 1
    writer.transport.resume_reading()
    async with asyncio.timeout(60):
        assert (await reader.read()).endswith(b"0\r\n\r\n")
    writer.close()
    assert len((await captured(gateway, session)).turns) == 2
