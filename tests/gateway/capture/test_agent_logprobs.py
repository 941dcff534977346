"""What a reply tells the agent of its numbers: those that it asked for, though the gateway has the engine tell all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from scripted_engine import ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]
ASKED = [{}, {"logprobs": False}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}]


@pytest.mark.parametrize("asked", ASKED)
async def test_an_agent_gets_the_numbers_it_asked_for(
    engine: ScriptedEngine, start_gateway: Start, asked: dict[str, Any]
) -> None:
    gateway = await start_gateway(engine)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    engine.replies.append({"content": "w11 w12 w13"})
    ours = {k: v for k, v in asked.items() if k != "return_token_ids"}
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        reply = await llm.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={k: v for k, v in asked.items() if k == "return_token_ids"},
            **ours,
        )
    extra = reply.model_extra or {}
    [choice] = reply.choices
    assert choice.message.content == "w11 w12 w13"
    wanted = any(asked.values())
    assert (choice.logprobs is not None) is wanted
    assert bool((choice.model_extra or {}).get("token_ids")) is wanted
    assert bool(extra.get("prompt_token_ids")) is wanted
    assert reply.usage is not None
    [turn] = (await GatewayClient(gateway.url).fetch_async([session.session_id]))[session.session_id].turns
    assert turn.completion_ids == engine.calls[0].completion_ids[0]
    assert None not in turn.logprobs


@pytest.mark.parametrize(("asked", "n"), [(asked, 1 + place % 2) for place, asked in enumerate(ASKED)])
async def test_a_stream_brings_the_numbers_that_were_asked_for(
    engine: ScriptedEngine, start_gateway: Start, asked: dict[str, Any], n: int
) -> None:
    gateway = await start_gateway(engine)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    engine.replies.append({"content": "w11 w12 w13"})
    ours = {k: v for k, v in asked.items() if k != "return_token_ids"}
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        stream = await llm.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            n=n,
            extra_body={k: v for k, v in asked.items() if k == "return_token_ids"},
            **ours,
        )
        events = [event async for event in stream]
    choices = [choice for event in events for choice in event.choices]
    assert "".join(c.delta.content or "" for c in choices if c.index == 0) == "w11 w12 w13"
    wanted = any(asked.values())
    assert any(c.logprobs is not None for c in choices) is wanted
    assert any((c.model_extra or {}).get("token_ids") for c in choices) is wanted
    assert any((event.model_extra or {}).get("prompt_token_ids") for event in events) is wanted
    turns = (await GatewayClient(gateway.url).fetch_async([session.session_id]))[session.session_id].turns
    assert [list(turn.completion_ids) for turn in turns] == [list(ids) for ids in engine.calls[0].completion_ids]
    assert all(None not in turn.logprobs for turn in turns)
