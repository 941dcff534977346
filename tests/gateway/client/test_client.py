"""The trainer's client, its plain face, and servers that are no gateway."""

from __future__ import annotations

import asyncio

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError, GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.client.captures import read_captures
from agentcore_rl_toolkit.gateway.http.client import stream
from scripted_engine import Fault, ScriptedEngine

from ..asking import asked_by, status_of, talking, until


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
async def test_what_is_no_gateway_is_said_and_not_a_traceback(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked_by(reader)
        writer.write(answer)

    async with talking(talk) as url:
        with pytest.raises(GatewayError):
            await GatewayClient(url, timeout_s=5).health_async()


@pytest.mark.parametrize("name", ["create_sessions", "fetch", "delete"])
async def test_one_id_where_several_are_due_is_said_and_not_taken_letter_by_letter(
    client: GatewayClient, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"give a list, \['abc'\]"):
        await getattr(client, name + "_async")("abc")
    assert (await client.stats_async())["sessions"] == 0


async def test_sessions_deleted_during_a_bulk_fetch_leave_the_others_whole(
    engine: ScriptedEngine, gateway: Gateway
) -> None:
    client = GatewayClient(gateway.url)
    names = [new_session_id() for _ in range(50)]  # more than the sockets hold
    for name in names:
        [session] = await client.create_sessions_async([name], metadata={"task": "x" * 500_000})
        assert await status_of(session) == 200
    body = {"session_ids": names, "close": False}
    reader = read_captures(stream("POST", f"{gateway.url}/admin/fetch", body=body), len(names))
    found = {(await anext(reader)).session_id}
    kept = [*names[:5], names[-1]]
    await client.delete_async(name for name in names if name not in kept)
    async for capture in reader:
        assert len(capture.turns) == 1
        found.add(capture.session_id)
    assert found >= set(kept)


@pytest.mark.parametrize("frames", [0, 1, 2, 3])
async def test_a_bulk_fetch_that_a_proxy_ends_early_is_an_error(
    client: GatewayClient, session: SessionHandle, frames: int
) -> None:
    """Also between two records or two sessions: a session that is missing would count as never opened."""
    assert await status_of(session) == 200
    names = [session.session_id, "unknown"]
    body = {"session_ids": names, "close": False}
    data = b"".join([piece async for piece in stream("POST", f"{client.url}/admin/fetch", body=body)])
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 4 + int.from_bytes(data[ends[-1] : ends[-1] + 4], "little"))
    assert len(ends) == 4

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked_by(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + data[: ends[frames]])

    async with talking(talk) as url:
        fetched = GatewayClient(url).fetch_async(names, close=False)
        if frames == 3:
            assert len((await fetched)[session.session_id].turns) == 1
        else:
            with pytest.raises(GatewayError, match="ended early"):
                await fetched


async def test_sessions_are_listed_with_their_running_calls(client: GatewayClient, engine: ScriptedEngine) -> None:
    quick, slow = await client.create_sessions_async(["listed-1", "listed-2"], metadata={"input_id": "sum"})
    await status_of(quick, "hello")
    gate = asyncio.Event()
    engine.faults.append(Fault(gate=gate))
    calling = asyncio.ensure_future(status_of(slow, "slow"))
    await until(lambda: len(engine.calls) == 2)
    running = await client.sessions_async(running=True)
    assert [s["session_id"] for s in running] == ["listed-2"]
    [call] = running[0]["calls"]
    assert call["state"] == "sampling"
    assert call["seconds"] >= 0
    found = {s["session_id"]: s for s in await client.sessions_async()}
    assert (found["listed-1"]["turns"], found["listed-1"]["calls"], found["listed-1"]["closed_s"]) == (1, [], None)
    assert found["listed-1"]["last_call_s"] > found["listed-1"]["created_s"]
    gate.set()
    await calling
    assert await client.sessions_async(running=True) == []
