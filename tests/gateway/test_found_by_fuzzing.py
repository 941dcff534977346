"""Small cases of what random loads, kills and damage found: what must hold is what `test_store_trouble` says of one segment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from scripted_engine import Fault, ScriptedEngine

from .asking import MODEL, Start, captured, gpt, opened, until
from .stores import locked


async def finish_reason(session: SessionHandle, answer: str, *, stream: bool) -> str | None:
    async with gpt(session) as llm:
        message = await llm.chat.completions.create(
            model="m", messages=[{"role": "user", "content": answer}], stream=stream
        )
        if isinstance(message, openai.AsyncStream):
            return [c.choices[0].finish_reason async for c in message if c.choices][-1]
        return message.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_token_ids_is_no_turn_where_prompts_are_rendered_here(
    engine: ScriptedEngine, start_gateway: Start, stream: bool
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)

    def without(reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply["choices"]:
            choice["token_ids"] = choice["logprobs"] = None
        return reply

    engine.faults.append(Fault(edit=without))
    with pytest.raises(openai.APIError, match=r"token ids|too early"):
        await finish_reason(session, "hello", stream=stream)
    await until(lambda: not gateway.running.calls)  # the reply's last bytes come before the end of the call
    found = await captured(gateway, session, close=False)
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
    session = await opened(gateway)
    client = GatewayClient(gateway.url)
    with locked(tmp_path, monkeypatch):
        answered = asyncio.ensure_future(finish_reason(session, "w11", stream=stream))
        await until(lambda: gateway.store.queue_depth)
        names = [session.session_id]
        reply: Any = client.pause_async(in_flight="abort") if how == "pause" else client.fetch_async(names)
        ended = asyncio.ensure_future(reply)
        held = gateway.sessions.by_id[session.session_id.encode()]
        await until(lambda: gateway.running.paused is not None or held.closed)
    assert len(await ended) == (2 if how == "pause" else 1)
    assert await answered == "stop"
    found = await captured(gateway, session, close=False)
    [call], [turn] = engine.calls, found.turns
    assert (turn.prompt_ids, turn.completion_ids) == (call.prompt_ids, call.completion_ids[0])
    assert found.errors == []


async def test_an_error_of_a_plain_endpoint_has_its_own_status_although_it_came_with_200(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine, engine="openai")
    session = await opened(gateway)
    body = b'{"error":{"message":"no provider has room","code":429}}'
    engine.faults.append(Fault(body=body))
    asked = {"model": "m", "messages": [{"role": "user", "content": "w11"}]}
    status, reply = await request("POST", session.base_url + "/chat/completions", body=asked, key=session.api_key)
    assert (status, json.loads(reply)["error"]["message"]) == (429, "no provider has room")
