"""What an agent took whole is a turn, and what it did not take whole is not trained on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle
from agentcore_rl_toolkit.trajectory import Trajectory, build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, asked, captured, opened, until
from ..stores import killed, locked

# -- several choices


@pytest.mark.parametrize("how", ["relayed", "sglang"])
async def test_several_choices_are_stored_when_the_agent_has_the_last_finish_reason(
    start_gateway: Start, tmp_path: Path, how: str
) -> None:
    """Also those of a stream whose connection to the engine stays open: the gateway may be killed at that moment."""
    more = {} if how == "relayed" else {"model_dir": str(MODEL), "engine": how}
    async with ScriptedEngine(tokens=3, token_s=0.1) as engine:
        engine.first_id, engine.last_id = 300, 500
        gateway = await start_gateway(engine, store_dir=str(tmp_path / "store"), **more)
        session = await opened(gateway)
        reader, writer = await asked(session, stream=True, n=2)
        got = b""
        async with asyncio.timeout(60):
            while got.count(b'"finish_reason":"') < 2:
                piece = await reader.read(2**16)
                assert piece, got
                got += piece
        writer.close()
        again = await start_gateway(engine, store_dir=killed(gateway, tmp_path / "killed"), **more)
        assert [t.choice_index for t in (await captured(again, session)).turns] == [0, 1]


# -- replies that no agent received


async def trajectory_of(gateway: Gateway, session: SessionHandle, *, close: bool = True) -> Trajectory:
    return build_trajectory(session.session_id, (await captured(gateway, session, close=close)).turns)


async def whole(reader: asyncio.StreamReader) -> dict[str, Any]:
    """A reply that is not streamed."""
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        reply: dict[str, Any] = json.loads(
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
        )
    return reply


def ids(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


async def lost(gateway: Gateway, engine: ScriptedEngine, session: SessionHandle, **fields: Any) -> None:
    """A call whose agent hangs up before its reply is complete, and does not ask again until it is recorded."""
    before, gate = len(engine.calls), asyncio.Event()
    engine.faults.append(Fault(gate=gate))
    _, writer = await asked(session, **fields)
    await until(lambda: len(engine.calls) > before)
    writer.transport.abort()
    await until(lambda: not any(call.reply.connections for call in gateway.running.calls))
    gate.set()
    await until(lambda: not gateway.running.calls)


@pytest.mark.parametrize("mode", [{}, {"model_dir": str(MODEL)}], ids=["relayed", "rendered"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_no_agent_received_is_not_trained_until_a_repetition_gets_it(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, mode: dict[str, Any], stream: bool
) -> None:
    """The repetition needs no retry count. It gets the reply after a restart of the gateway too."""
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, store_dir=str(tmp_path), **mode)
    session = await opened(gateway, max_turns=1)
    await lost(gateway, engine, session, stream=stream)
    for restart in (False, True):
        if restart:
            await gateway.stop(grace_s=0.2)
            gateway = await start_gateway(engine, store_dir=str(tmp_path), **mode)
        stored = gateway.sessions.by_id[session.session_id.encode()]
        assert (stored.turns, stored.started_turns) == (1, 0)
        made = await trajectory_of(gateway, session, close=False)
        assert (made.report.untrainable_reasons, made.sequences) == ({"not_delivered": 1}, [])
    path = session.base_url.split("/", 3)[3]
    reader, writer = await asked(dataclasses.replace(session, base_url=f"{gateway.url}/{path}"), stream=stream)
    async with asyncio.timeout(60):
        if stream:
            await reader.readuntil(b"data: [DONE]\n\n")
        else:
            await whole(reader)
    writer.close()
    await until(lambda: not gateway.connections)
    assert len(engine.calls) == 1
    for _ in range(2):
        made = await trajectory_of(gateway, session, close=False)
        assert (made.report.turns, made.report.untrainable_turns, len(made.sequences)) == (1, 0, 1)
        await gateway.stop(grace_s=0.2)
        gateway = await start_gateway(engine, store_dir=str(tmp_path), **mode)


async def test_a_reply_whose_agent_left_while_it_was_recorded_is_not_received(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = await opened(gateway)
    with locked(tmp_path, monkeypatch):
        _, writer = await asked(session)
        await until(lambda: gateway.store.queue_depth > 0)
        writer.transport.abort()
        await until(lambda: not gateway.connections)
    await until(lambda: not gateway.running.calls)
    made = await trajectory_of(gateway, session)
    assert (made.report.turns, made.report.untrainable_reasons, made.sequences) == (1, {"not_delivered": 1}, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_two_lost_samples_goes_to_one_request_and_a_third_request_is_a_sample(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, stream: bool
) -> None:
    gate = asyncio.Event()
    engine.faults += [Fault(gate=gate)] * 2
    writers = []
    for count in (1, 2):
        writers.append((await asked(session, stream=stream))[1])
        await until(lambda count=count: len(engine.calls) == count)
    for writer in writers:
        writer.transport.abort()
    await until(lambda: not gateway.connections)
    gate.set()
    await until(lambda: not gateway.running.calls)
    replies = set()
    for _ in range(3):
        reader, writer = await asked(session, stream=stream)
        async with asyncio.timeout(60):
            replies.add(await reader.readuntil(b"data: [DONE]\n\n") if stream else ids(await whole(reader)))
        writer.close()
    assert len(replies) == 3
    assert len(engine.calls) == 3
    assert len((await trajectory_of(gateway, session)).sequences) == 3


async def test_a_client_that_resets_its_connection_after_the_reply_has_received_it(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    """As a proxy does that ends its connections to servers with SO_LINGER 0."""
    reader, writer = await asked(session)
    await whole(reader)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await until(lambda: not gateway.connections)
    made = await trajectory_of(gateway, session)
    assert (made.report.turns, made.report.untrainable_turns) == (1, 0)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_wants_the_connection_closed_has_taken_its_reply(
    gateway: Gateway, session: SessionHandle, version: str
) -> None:
    reader, writer = await asked(session, headers={"connection": "close"}, version=version)
    await whole(reader)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    await until(lambda: not gateway.connections)
    made = await trajectory_of(gateway, session)
    assert (made.report.turns, made.report.untrainable_turns) == (1, 0)
