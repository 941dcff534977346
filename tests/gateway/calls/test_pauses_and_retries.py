"""Pauses, outages and repeated requests when two things happen at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, Limits, SessionHandle
from agentcore_rl_toolkit.gateway import retries as rules
from agentcore_rl_toolkit.gateway.router import RunningCalls
from agentcore_rl_toolkit.gateway.token_calls import sampling
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, USER, Start, opened, until

BODY = {"model": "m", "messages": USER, "max_tokens": 8}


async def post(session: SessionHandle, timeout_s: float = 60.0, **headers: str) -> httpx.Response:
    key = {"authorization": f"Bearer {session.api_key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    async with httpx.AsyncClient(timeout=timeout_s) as http:
        return await http.post(session.base_url + "/chat/completions", json=BODY, headers=key)


async def test_a_gateway_that_comes_back_while_the_others_pause_is_paused_and_has_the_version(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    first, second = [await start_gateway(engine) for _ in range(2)]
    port = int(second.url.rpartition(":")[2])
    await second.stop(grace_s=0)
    client = GatewayClient([first.url, second.url])
    await client.resume_async()  # the second gateway is away from here on
    session = await opened(first)
    gate = asyncio.Event()
    engine.faults.append(Fault(gate=gate))
    call = asyncio.create_task(post(session))
    await until(lambda: engine.calls)
    pause = asyncio.create_task(client.pause_async(timeout_s=60))
    await until(lambda: first.running.paused)
    back = await start_gateway(engine, port=port)
    assert await client.away_async() == {}
    assert back.running.paused
    gate.set()
    await pause
    assert (await call).status_code == 200


@pytest.mark.parametrize("why", ["orphan", "pause"])
async def test_an_agent_that_asks_again_does_not_join_a_call_that_is_aborted(
    engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(sampling, "SHORT_BYTES", 0)  # a thread renders the request
    orphan_s = 0.1 if why == "orphan" else 60.0
    gateway = await start_gateway(engine, model_dir=str(MODEL), limits=Limits(connect_s=60.0, orphan_s=orphan_s))
    session = await opened(gateway)
    assert gateway.token_mode is not None
    renderer = gateway.token_mode.renderer
    begun, going_on, render = threading.Event(), threading.Event(), renderer.render

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        assert going_on.wait(60)
        return render(*args, **options)

    monkeypatch.setattr(renderer, "render", slow)
    first = asyncio.create_task(post(session))
    await asyncio.to_thread(begun.wait, 60)
    [call] = gateway.running.calls
    first.cancel()
    await until(lambda: not call.reply.connections)
    if why == "pause":
        pause = asyncio.create_task(GatewayClient(gateway.url).pause_async(in_flight="abort", timeout_s=30))
    await until(lambda: call.ending)
    again = asyncio.create_task(post(session))
    await until(lambda: len(gateway.running.calls) == 2)
    going_on.set()
    if why == "pause":
        await pause
        await GatewayClient(gateway.url).resume_async()
    assert (await again).status_code == 200
    assert len(engine.calls) == 1


async def test_the_retry_of_a_reply_without_choices_is_sampled_and_is_no_earlier_sample(
    engine: ScriptedEngine, gateway: Gateway
) -> None:
    session = await opened(gateway)
    first = (await post(session)).json()
    engine.faults.append(Fault(edit=lambda reply: {**reply, "choices": []}))
    assert (await post(session)).status_code == 502
    again = (await post(session, x_stainless_retry_count="1")).json()
    assert len(engine.calls) == 3
    assert again["choices"][0]["message"] != first["choices"][0]["message"]


async def test_an_idempotency_key_is_known_longer_than_a_request_without_one(
    engine: ScriptedEngine, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MEMORY_S", -1.0)
    session = await opened(gateway)
    first = await post(session, idempotency_key="one")
    again = await post(session, idempotency_key="one")
    texts = [reply.json()["choices"][0]["message"]["content"] for reply in (first, again)]
    assert texts[0] == texts[1]
    await post(session)
    await post(session, x_stainless_retry_count="1")
    assert len(engine.calls) == 3


async def test_a_pause_does_not_wait_for_calls_that_wait_for_a_server(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=60.0, outage_s=60.0))
    session = await opened(gateway)
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    call = asyncio.create_task(post(session))
    await until(lambda: gateway.router.waiting)
    assert await GatewayClient(gateway.url).pause_async(timeout_s=300) == {"paused": True, "in_flight": 0}
    await engine.start(port)
    await until(lambda: not gateway.router.waiting)
    assert not engine.calls, "it is held"
    await GatewayClient(gateway.url).resume_async()
    assert (await call).status_code == 200


async def test_held_calls_cost_no_more_each_if_there_are_many() -> None:
    class Held:
        def enter(self, stage: str, limit_s: float | None) -> None: ...

    async def cpu_s(calls: int) -> float:
        running = RunningCalls(Limits())
        running.paused = True
        began = time.process_time()
        tasks = [asyncio.create_task(running.resumed(Held())) for _ in range(calls)]
        while len(running.waiting) < calls:  # noqa: ASYNC110  (tasks of this loop)
            await asyncio.sleep(0)
        running.resume()
        await asyncio.gather(*tasks)
        return time.process_time() - began

    await cpu_s(200)
    few, many = min([await cpu_s(500) for _ in range(3)]), min([await cpu_s(4000) for _ in range(3)])
    assert many < 8 * 3 * few, "eight times as many"
