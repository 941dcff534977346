"""Calls that are damaged on disk while the gateway runs: who asks for one again is answered, and the damage is told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionCapture, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

from ..stores import spoil

MODEL = str(Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights")
USER = [{"role": "user", "content": "hello there"}]
Start = Callable[..., Awaitable[Gateway]]


async def opened(gateway: Gateway, **settings: Any) -> SessionHandle:
    return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()], **settings))[0]


async def ask(session: SessionHandle, *, again: bool = False, key: str | None = None, **asked: Any) -> str:
    """The text that one attempt is answered with, on a connection of its own."""
    headers = {"x-stainless-retry-count": str(int(again))} | ({"idempotency-key": key} if key else {})
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        body: dict[str, Any] = {"model": "m", "messages": USER, **asked}
        if asked.get("stream"):
            events = await llm.chat.completions.create(**body, extra_headers=headers)
            return "".join([c.choices[0].delta.content or "" async for c in events if c.choices])
        reply = await llm.chat.completions.with_raw_response.create(**body, extra_headers=headers)
        return str(json.loads(reply.text)["choices"][0]["message"]["content"])


async def fetched(session: SessionHandle, gateway: Gateway) -> SessionCapture:
    return (await GatewayClient(gateway.url).fetch_async([session.session_id], close=False))[session.session_id]


async def damaged_calls(gateway: Gateway) -> int:
    return int((await GatewayClient(gateway.url).stats_async())["store_damaged_calls"])


@pytest.mark.parametrize("key", [None, "k"])
async def test_after_a_restart_damage_is_passed_over_and_the_calls_beside_it_are_repeated(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, key: str | None
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = await opened(gateway)
    reply = [await ask(session, key=key, temperature=n / 4) for n in range(3)]
    await gateway.stop(grace_s=0.2)
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    session = dataclasses.replace(session, base_url=f"{gateway.url}/{session.base_url.split('/', 3)[3]}")
    spoil(gateway, session.session_id, 1)
    assert await ask(session, again=True, key=key, temperature=0.0) == reply[0]
    assert await ask(session, again=True, key=key, temperature=0.5) == reply[2]
    anew = await ask(session, again=True, key=key, temperature=0.25)
    assert anew != reply[1]
    assert await ask(session, again=True, key=key, temperature=0.25) == anew
    assert len(engine.calls) == 4
    assert await damaged_calls(gateway) == 1
    found = await fetched(session, gateway)
    assert [t.completion_ids for t in found.turns][-1] == list(engine.calls[-1].completion_ids[0])
    assert [t.prompt_ids for t in found.turns][-1] == list(engine.calls[-1].prompt_ids)


async def test_traces_of_other_calls_are_told_beside_a_damaged_one(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine)
    damaged, whole = await opened(gateway), await opened(gateway)
    for session in (damaged, whole):
        for seed in range(2):
            await ask(session, seed=seed)
    spoil(gateway, damaged.session_id, 1)
    traces = {}
    for session in (damaged, whole):
        status, reply = await request("GET", f"{gateway.url}/sessions/{session.session_id}/traces")
        traces[session.session_id] = json.loads(reply)
        assert status == 200
    assert [len(traces[s.session_id]) for s in (damaged, whole)] == [1, 2]
    for trace in (each["trace_id"] for group in traces.values() for each in group):
        status, reply = await request("GET", f"{gateway.url}/traces/{trace}")
        assert (status, json.loads(reply)["trace_id"]) == (200, trace)
