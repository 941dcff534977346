"""Small cases of what random loads, kills and damage found: what must hold is what `test_store_trouble` says of one segment."""

from __future__ import annotations

import asyncio
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
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

from .stores import locked

MODEL = str(Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights")
Start = Callable[..., Awaitable[Gateway]]


async def opened(gateway: Gateway, *names: str) -> list[SessionHandle]:
    return await GatewayClient(gateway.url).create_sessions_async(names or [new_session_id()])


async def finish_reason(session: SessionHandle, answer: str, *, stream: bool) -> str | None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        message = await llm.chat.completions.create(
            model="m", messages=[{"role": "user", "content": answer}], stream=stream
        )
        if isinstance(message, openai.AsyncStream):
            return [c.choices[0].finish_reason async for c in message if c.choices][-1]
        return message.choices[0].finish_reason


async def fetched(gateway: Gateway, *sessions: SessionHandle) -> list[SessionCapture]:
    names = [s.session_id for s in sessions]
    found = await GatewayClient(gateway.url).fetch_async(names, close=False)
    return [found[name] for name in names]


def only_true(engine: ScriptedEngine, capture: SessionCapture) -> int:
    """How many turns there are, each of which the engine has answered."""
    answered = {tuple(call.completion_ids[0]): call.prompt_ids for call in engine.calls if call.completion_ids}
    for turn in capture.turns:
        assert turn.prompt_ids == answered[tuple(turn.completion_ids)]
    return len(capture.turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_token_ids_is_no_turn_where_prompts_are_rendered_here(
    engine: ScriptedEngine, start_gateway: Start, stream: bool
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=MODEL)
    [session] = await opened(gateway)

    def without(reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply["choices"]:
            choice["token_ids"] = choice["logprobs"] = None
        return reply

    engine.faults.append(Fault(edit=without))
    with pytest.raises(openai.APIError, match=r"token ids|before it was whole"):
        await finish_reason(session, "hello", stream=stream)
    async with asyncio.timeout(30):
        while gateway.running:  # noqa: ASYNC110  (the reply's last bytes come before the end of the call)
            await asyncio.sleep(0.005)
    [found] = await fetched(gateway, session)
    assert found.turns == []
    assert len(found.errors) == 1


@pytest.mark.parametrize(("how", "stream"), [("pause", True), ("close", False)])
async def test_a_call_that_is_ended_while_the_disk_takes_its_record_is_answered(
    engine: ScriptedEngine,
    start_gateway: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    how: str,
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    [session] = await opened(gateway)
    client = GatewayClient(gateway.url)
    with locked(tmp_path, monkeypatch):
        answered = asyncio.ensure_future(finish_reason(session, "w11", stream=stream))
        async with asyncio.timeout(30):
            while not gateway.store.queue_depth:  # noqa: ASYNC110  (a socket at the other end)
                await asyncio.sleep(0.005)
            names = [session.session_id]
            reply: Any = client.pause_async(in_flight="abort") if how == "pause" else client.fetch_async(names)
            ended = asyncio.ensure_future(reply)
            while gateway.running.paused is None and not gateway.sessions.by_id[session.session_id.encode()].closed:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert len(await ended) == (2 if how == "pause" else 1)
    assert await answered == "stop"
    [found] = await fetched(gateway, session)
    assert only_true(engine, found) == 1
    assert found.errors == []


async def test_an_error_of_a_plain_endpoint_has_its_own_status_although_it_came_with_200(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, engine="openai")
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    body = b'{"error":{"message":"no provider has room","code":429}}'
    engine.faults.append(Fault(body=body))
    asked = {"model": "m", "messages": [{"role": "user", "content": "w11"}]}
    status, reply = await request("POST", session.base_url + "/chat/completions", body=asked, key=session.api_key)
    assert (status, json.loads(reply)["error"]["message"]) == (429, "no provider has room")
