"""Several engines: sessions stay with theirs, failures move on, servers come and go while calls run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import (
    Gateway,
    GatewayClient,
    Limits,
    SessionHandle,
)
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import decode_ids
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, gpt, until
from ..asking import status_of as ask


@pytest.fixture
async def engines() -> AsyncIterator[list[ScriptedEngine]]:
    running = [ScriptedEngine(), ScriptedEngine()]
    for engine in running:
        await engine.start()
    yield running
    for engine in running:
        await engine.stop()


async def arrived(*engines: ScriptedEngine, count: int = 1) -> None:
    """So many calls are at these engines."""
    await until(lambda: sum(len(engine.calls) for engine in engines) >= count)


async def opened(gateway: Gateway, count: int) -> tuple[GatewayClient, list[SessionHandle]]:
    client = GatewayClient(gateway.url)
    return client, await client.create_sessions_async([new_session_id() for _ in range(count)])


async def add_server(gateway: Gateway, url: str, **more: Any) -> str:
    """The id of an engine that is added, or what is wrong with it."""
    status, reply = await request("POST", gateway.url + "/admin/workers", body={"url": url, **more})
    answer = json.loads(reply)
    return str(answer["worker_id"] if status == 200 else answer["error"]["message"])


async def remove_server(gateway: Gateway, worker_id: str) -> None:
    assert (await request("DELETE", f"{gateway.url}/admin/workers/{worker_id}"))[0] == 200


async def test_a_session_stays_with_its_engine_and_sessions_are_spread(
    engines: list[ScriptedEngine], start_gateway: Start
) -> None:
    for engine in engines:
        engine.faults.extend([Fault(delay_s=0.05)] * 100)
    gateway = await start_gateway(*engines)
    client, sessions = await opened(gateway, 6)
    for _ in range(3):
        assert set(await asyncio.gather(*(ask(s) for s in sessions))) == {200}
    assert [len(e.calls) for e in engines] == [9, 9]
    found = await client.fetch_async([s.session_id for s in sessions])
    for capture in found.values():
        assert len({r.upstream for r in capture.records}) == 1


async def test_calls_of_a_dead_engine_are_answered_by_another(
    engines: list[ScriptedEngine], start_gateway: Start
) -> None:
    gateway = await start_gateway(*engines)
    client, sessions = await opened(gateway, 8)
    await asyncio.gather(*(ask(s) for s in sessions))
    await engines[0].stop()
    started = asyncio.get_running_loop().time()
    for _ in range(3):
        assert set(await asyncio.gather(*(ask(s) for s in sessions))) == {200}
    assert asyncio.get_running_loop().time() - started < 45  # and no call waits until a deadline, of a minute and more
    found = await client.fetch_async([s.session_id for s in sessions])
    assert [len(c.turns) for c in found.values()] == [4] * 8
    assert all(c.errors == [] for c in found.values())


async def test_a_busy_engines_503_goes_to_another(engines: list[ScriptedEngine], start_gateway: Start) -> None:
    gateway = await start_gateway(*engines)
    _, [session] = await opened(gateway, 1)
    engines[0].faults.append(Fault(status=503))
    assert await ask(session) == 200
    assert len(engines[1].calls) == 1
    assert gateway.counters["retries"] == 1


@pytest.mark.parametrize(("cut", "tries"), [(0, 2), (20, 2), (700, 1)])
async def test_a_stream_moves_to_another_engine_only_before_its_first_byte(
    engines: list[ScriptedEngine], start_gateway: Start, cut: int, tries: int
) -> None:
    gateway = await start_gateway(*engines)
    client, [session] = await opened(gateway, 1)
    engines[0].faults.append(Fault(drop_after=cut))
    pieces: list[str] = []

    async def read() -> None:
        async with gpt(session) as llm:
            messages = [{"role": "user", "content": "hi"}]
            async for chunk in await llm.chat.completions.create(model="m", messages=messages, stream=True):  # type: ignore[call-overload]
                pieces.append(chunk.choices[0].delta.content or "")

    if tries == 1:
        with pytest.raises(openai.APIError):
            await read()
    else:
        await read()
    assert sum(len(e.calls) for e in engines) == tries
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert len(capture.turns) == tries - 1
    assert [e["status"] for e in capture.errors] == (["partial"] if tries == 1 else [])
    if tries == 2:  # not a word of the first try is in what the agent read
        assert "".join(pieces).split() == decode_ids(engines[1].calls[0].completion_ids[0]).split()


async def test_an_engine_that_was_away_is_used_again(start_gateway: Start) -> None:
    engine = ScriptedEngine()
    await engine.start()
    port = int(engine.url.rsplit(":", 1)[1])
    gateway = await start_gateway(engine)
    _, [session] = await opened(gateway, 1)
    assert await ask(session) == 200
    await engine.stop()
    body = {"messages": [{"role": "user", "content": "hello"}]}
    status, reply = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    assert (status, b"cannot be reached" in reply) == (502, True)
    assert b"127.0.0.1" not in reply  # where the engine is, is not the agent's to know
    status, reply = await request("GET", session.base_url + "/models", key=session.api_key)
    assert (status, b"127.0.0.1" in reply) == (502, False)
    again = ScriptedEngine()
    await again.start(port)
    assert await ask(session) == 200
    await again.stop()


async def test_an_engine_is_drained_and_removed_while_calls_run(
    engines: list[ScriptedEngine], start_gateway: Start
) -> None:
    gateway = await start_gateway(engines[0])
    client, sessions = await opened(gateway, 2)
    gate = asyncio.Event()
    engines[0].faults.append(Fault(gate=gate))
    running = asyncio.ensure_future(ask(sessions[0]))
    await arrived(engines[0])
    added = await add_server(gateway, engines[1].url)
    await remove_server(gateway, "w0")
    assert await ask(sessions[1]) == 200
    assert len(engines[1].calls) == 1
    gate.set()
    assert await running == 200
    async with asyncio.timeout(30):
        while [w["worker_id"] for w in (await client.stats_async())["workers"]] != [added]:  # noqa: ASYNC110  (swept by its clock)
            await asyncio.sleep(0.05)
    assert await ask(sessions[0]) == 200


async def test_an_engine_that_cannot_be_asked_is_refused(engines: list[ScriptedEngine], start_gateway: Start) -> None:
    gateway = await start_gateway(engines[0])
    for url in ("file:///etc/passwd", "http://u:p@127.0.0.1:80", "http://127.0.0.1:99999", "gopher://x"):
        assert "upstream" in await add_server(gateway, url)
    assert len(gateway.router.workers) == 1


async def test_no_engine_at_all_is_said(start_gateway: Start) -> None:
    gateway = await start_gateway()
    _, [session] = await opened(gateway, 1)
    assert await ask(session) == 503


async def test_a_pause_holds_new_calls_until_running_ones_are_done(
    engines: list[ScriptedEngine], start_gateway: Start
) -> None:
    gateway = await start_gateway(engines[0])
    client, sessions = await opened(gateway, 2)
    engines[0].faults.append(Fault(delay_s=0.3))
    running = asyncio.ensure_future(ask(sessions[0]))
    await arrived(engines[0])
    reply = await client.pause_async()
    assert reply == {"paused": True, "in_flight": 0}
    assert running.done() or await running == 200
    held = asyncio.ensure_future(ask(sessions[1]))
    await asyncio.sleep(0.1)
    assert not held.done()
    assert len(engines[0].calls) == 1
    await client.set_weight_version_async(2)
    await client.resume_async()
    assert await held == 200
    found = await client.fetch_async([s.session_id for s in sessions])
    assert [c.turns[0].weight_version_first for c in found.values()] == [None, 2]


async def test_a_call_is_held_for_as_long_as_is_allowed(engines: list[ScriptedEngine], start_gateway: Start) -> None:
    gateway = await start_gateway(engines[0], limits=Limits(hold_s=0.3))
    client, [session] = await opened(gateway, 1)
    await client.pause_async()
    assert await ask(session) == 429


@pytest.mark.parametrize("says", [None, 2])  # an engine that names a version names the one it ended with
@pytest.mark.parametrize(("in_flight", "status"), [("abort", 503), ("continue", 200)])
async def test_running_calls_are_aborted_or_go_on_as_asked(
    engines: list[ScriptedEngine], start_gateway: Start, in_flight: str, status: int, says: int | None
) -> None:
    gateway = await start_gateway(engines[0])
    gateway.running.weight_version = 1
    client, sessions = await opened(gateway, 2)
    gate = asyncio.Event()
    engines[0].faults.append(Fault(gate=gate))
    running = asyncio.ensure_future(ask(sessions[0]))
    await arrived(engines[0])
    await client.pause_async(in_flight=in_flight)
    await client.set_weight_version_async(2)
    engines[0].weight_version = says
    gate.set()
    assert await running == status
    await client.resume_async()
    assert await ask(sessions[1]) == 200
    turns = (await client.fetch_async([sessions[0].session_id]))[sessions[0].session_id].turns
    spans = [(t.weight_version_first, t.weight_version_last) for t in turns]
    assert spans == ([(1, 2)] if status == 200 else [])


async def test_a_servers_name_cannot_break_the_metrics(engines: list[ScriptedEngine], start_gateway: Start) -> None:
    gateway = await start_gateway(engines[0])
    body = {"url": engines[1].url, "worker_id": 'a"} 1\nfake_metric 7\\'}
    assert (await request("POST", gateway.url + "/admin/workers", body=body))[0] == 200
    _, text = await request("GET", gateway.url + "/metrics")
    assert b"\nfake_metric" not in text
    assert rb'{worker="a\"} 1\nfake_metric 7\\"}' in text


async def bearer(engine: ScriptedEngine, session: SessionHandle) -> tuple[str | None, str | None]:
    assert await ask(session, str(len(engine.calls))) == 200
    headers = engine.calls[-1].headers
    return headers.get("authorization"), headers.get("host")


async def test_a_server_that_is_added_again_goes_on_with_what_is_given_and_keeps_its_key(
    engines: list[ScriptedEngine], start_gateway: Start
) -> None:
    gateway = await start_gateway(engines[0])
    client, [session] = await opened(gateway, 1)
    url = engines[0].url
    assert await bearer(engines[0], session) == (None, url.removeprefix("http://"))
    assert await add_server(gateway, url, api_key="KEY-C") == "w0"
    assert (await bearer(engines[0], session))[0] == "Bearer KEY-C"
    engines[0].faults.append(Fault(delay_s=60.0))
    running = asyncio.ensure_future(bearer(engines[0], session))
    await until(lambda: engines[0].active)
    await remove_server(gateway, "w0")  # it stays until its call is done
    for same in ("/", "/v1", "/v1/"):
        assert await add_server(gateway, url + same) == "w0"
        assert (await bearer(engines[0], session))[0] == "Bearer KEY-C"
    [reply] = (await client.stats_async())["workers"]
    assert (reply["engine"], reply["draining"]) == ("vllm", False)
    assert (reply["calls"], reply["failures"], reply["active_requests"]) == (6, 0, 1)
    running.cancel()


async def test_a_server_is_removed_by_any_name_that_it_was_given(
    engines: list[ScriptedEngine], start_gateway: Start
) -> None:
    gateway, name = await start_gateway(engines[0]), "node 1/gpu 2%"
    assert await add_server(gateway, engines[1].url, worker_id=name) == name
    await remove_server(gateway, quote(name, safe=""))
    assert list(gateway.router.workers) == ["w0"]
