"""What an agent took whole is a turn, and what it did not take whole is not trained on."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine, decode_ids
from agentcore_rl_toolkit.trajectory import Trajectory, build_trajectory

from ..asking import MODEL, USER, Start, asked, captured, opened, until
from ..served import Served
from ..sglang import TokenEngine
from ..stores import locked

# -- several choices


@pytest.mark.parametrize("how", ["relayed", "sglang"])
async def test_several_choices_are_stored_when_the_agent_has_the_last_finish_reason(tmp_path: Path, how: str) -> None:
    """Also those of a stream whose connection to the engine stays open: the gateway may be killed at that moment."""
    async with TokenEngine(tokens=3, token_s=0.4) as engine:
        engine.first_id, engine.last_id = 300, 500
        more = () if how == "relayed" else ("--model", str(MODEL))
        kind = "vllm" if how == "relayed" else how
        gateway = Served(tmp_path, engine, "--store", str(tmp_path / "store"), *more, kind=kind)
        try:
            url = await gateway.start()
            [session] = await GatewayClient(url).create_sessions_async([new_session_id()])
            reader, writer = await asked(session, stream=True, n=2)
            got = b""
            async with asyncio.timeout(60):
                while got.count(b'"finish_reason":"') < 2:
                    piece = await reader.read(2**16)
                    assert piece, got
                    got += piece
            gateway.kill()
            writer.close()
            await gateway.start()
            turns = (await GatewayClient(url).fetch_async([session.session_id]))[session.session_id].turns
            assert [t.choice_index for t in turns] == [0, 1]
        finally:
            gateway.kill()


# -- replies that nobody took


async def trajectory_of(gateway: Gateway, session: SessionHandle, *, close: bool = True) -> Trajectory:
    return build_trajectory(session.session_id, (await captured(gateway, session, close=close)).turns)


def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection with what came on it unread: the system resets it."""
    writer.transport.abort()


async def unread(writer: asyncio.StreamWriter) -> None:
    """Return when something of a reply lies in our system, and nobody has read it."""
    sock = writer.transport.get_extra_info("socket")
    await until(lambda: int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder))


async def sip(writer: asyncio.StreamWriter, upto: bytes) -> None:
    """Read no more of a reply than up to these bytes."""
    got = b""
    while not got.endswith(upto):
        await unread(writer)
        got += os.read(writer.transport.get_extra_info("socket").fileno(), 1)


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


@pytest.mark.parametrize(("how", "read"), [("relayed", "half"), ("rendered", "nothing")])
async def test_a_reply_that_was_not_taken_whole_is_not_trained_beside_its_retry(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, how: str, read: str
) -> None:
    """The client asks again by itself, without a retry count: a call of its own, in the first one's stead."""
    engine.first_id, engine.last_id, engine.tokens = 300, 500, 2000 if read == "half" else 8
    settings: dict[str, Any] = {"model_dir": str(MODEL)} if how == "rendered" else {}
    gateway = await start_gateway(engine, store_dir=str(tmp_path), **settings)
    session = await opened(gateway, max_turns=2)
    if read == "half":
        _, writer = await asked(session, reads=False, limit=1024, max_tokens=2000)
        await sip(writer, b'"usage"')
    else:
        _, writer = await asked(session, reads=False)
    await unread(writer)
    await until(lambda: not gateway.running)
    hang_up(writer)
    await until(lambda: not gateway.connections)
    reader, writer = await asked(session)
    again = await whole(reader)
    messages = [*USER, again["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    reader, other = await asked(session, messages=messages)  # the lost one has used up no turn
    await whole(reader)
    for one in (writer, other):
        one.close()
    await until(lambda: not gateway.connections)

    def check(made: Trajectory) -> None:
        assert made.report.turns == 3
        assert made.report.untrainable_reasons == {"not_delivered": 1}
        assert made.report.superseded_turns == 0
        trained = [turn for sequence in made.sequences for turn in sequence.turn_ids]
        assert len(trained) == 2

    check(await trajectory_of(gateway, session, close=False))
    await gateway.stop(grace_s=0.2)
    gateway = await start_gateway(engine, store_dir=str(tmp_path), **settings)
    check(await trajectory_of(gateway, session, close=False))
    stored = gateway.sessions.by_id[session.session_id.encode()]
    assert (stored.turns, stored.started_turns) == (3, 2)


async def test_a_reply_whose_agent_left_while_it_was_recorded_is_trained_when_its_retry_gets_it(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = await opened(gateway)
    with locked(tmp_path, monkeypatch):
        _, writer = await asked(session, reads=False)
        await until(lambda: gateway.store.queue_depth > 0)
        hang_up(writer)
        await until(lambda: not gateway.connections)
    await until(lambda: not gateway.running)
    made = await trajectory_of(gateway, session, close=False)
    assert (made.report.turns, made.report.untrainable_reasons, made.sequences) == (1, {"not_delivered": 1}, [])
    _, writer = await asked(session, headers={"x-stainless-retry-count": "1"}, reads=False)  # this one breaks as well
    await unread(writer)
    hang_up(writer)
    await until(lambda: not gateway.connections)
    made = await trajectory_of(gateway, session, close=False)
    assert (made.report.turns, made.report.untrainable_reasons) == (1, {"not_delivered": 1})
    reader, writer = await asked(session, headers={"x-stainless-retry-count": "1"})
    await whole(reader)
    made = await trajectory_of(gateway, session)
    assert (made.report.turns, made.report.untrainable_reasons, len(made.sequences)) == (1, {}, 1)
    writer.close()


@pytest.mark.parametrize("retry", ["counted", "named"])
async def test_a_lost_reply_that_its_client_gets_in_the_end_is_trained(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, retry: str
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = await opened(gateway)
    named = {"idempotency-key": "k"} if retry == "named" else {}
    _, writer = await asked(session, headers=named, reads=False)
    await unread(writer)
    await until(lambda: not gateway.running)
    hang_up(writer)
    await until(lambda: not gateway.connections)
    assert (await trajectory_of(gateway, session, close=False)).report.untrainable_reasons == {"not_delivered": 1}
    reader, writer = await asked(session, headers=named or {"x-stainless-retry-count": "1"})
    await whole(reader)
    writer.close()
    await until(lambda: not gateway.connections)
    assert len(engine.calls) == 1
    for _ in range(2):
        made = await trajectory_of(gateway, session, close=False)
        assert (made.report.turns, made.report.untrainable_turns, len(made.sequences)) == (1, 0, 1)
        await gateway.stop(grace_s=0.2)
        gateway = await start_gateway(engine, store_dir=str(tmp_path))


async def test_each_of_two_lost_samples_has_a_retry_of_its_own(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle
) -> None:
    both = [await asked(session, reads=False) for _ in range(2)]
    for _, writer in both:
        await unread(writer)
    await until(lambda: not gateway.running)
    for _, writer in both:
        hang_up(writer)
    await until(lambda: not gateway.connections)
    entries = []
    for _ in range(2):
        reader, writer = await asked(session, headers={"x-stainless-retry-count": "1"})
        entries.append(ids(await whole(reader)))
        writer.close()
    assert len(set(entries)) == 2
    assert len(engine.calls) == 2
    assert len((await trajectory_of(gateway, session)).sequences) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_equal_calls_are_samples_of_their_own_whatever_became_of_the_others(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, stream: bool
) -> None:
    """Neither at the same time nor later does one get the reply of another, without a key or a retry count."""
    _, lost = await asked(session, stream=stream, reads=False)
    await unread(lost)
    await until(lambda: not gateway.running)
    hang_up(lost)
    await until(lambda: not gateway.connections)
    connections = [await asked(session, stream=stream) for _ in range(3)]
    reply = set()
    for reader, writer in connections:
        async with asyncio.timeout(60):
            reply.add(await reader.readuntil(b"0\r\n\r\n") if stream else ids(await whole(reader)))
        writer.close()
    assert len(reply) == 3
    assert len(engine.calls) == 4
    assert gateway.counters["turns_joined"] == 0
    made = await trajectory_of(gateway, session)
    assert made.report.turns == 4
    assert sum(len(sequence.turn_ids) for sequence in made.sequences) == 3


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
async def test_an_agent_that_leaves_a_stream_behind_its_finish_reason_has_the_reply_unless_it_asks_again(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, retried: bool, goes_on: bool
) -> None:
    _, writer = await asked(session, stream=True, reads=False)
    await sip(writer, b'"finish_reason":"')
    await until(lambda: not gateway.running)
    await unread(writer)
    hang_up(writer)
    await until(lambda: not gateway.connections)
    if retried:
        reader, writer = await asked(session, stream=True)
        async with asyncio.timeout(60):
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    if goes_on:
        message = {"role": "assistant", "content": decode_ids(engine.calls[0].completion_ids[0])}
        reader, writer = await asked(session, messages=[*USER, message, {"role": "user", "content": "go on"}])
        await whole(reader)
        writer.close()
    made = await trajectory_of(gateway, session)
    trained = [turn for sequence in made.sequences for turn in sequence.turn_ids]
    assert len(trained) == 1 + goes_on
    assert made.report.superseded_turns == retried
    assert made.report.untrainable_turns == 0


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
