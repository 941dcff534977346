"""What a whole reply tells the agent of its numbers: those that it asked for, though the gateway has the engine tell all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, scan
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture(params=["compiled", "plain Python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain Python":
        monkeypatch.setattr(scan, "lift", lambda reply: None)
    elif not scan.COMPILED:
        pytest.skip("built without the C extension")


@pytest.mark.parametrize(
    "asked", [{}, {"logprobs": False}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}]
)
async def test_an_agent_gets_the_numbers_it_asked_for(
    engine: ScriptedEngine, start_gateway: Start, reader: None, asked: dict[str, Any]
) -> None:
    gateway = await start_gateway(engine)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    engine.replies.append({"content": "w11 w12 w13"})
    ours = {k: v for k, v in asked.items() if k != "return_token_ids"}
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        told = await llm.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={k: v for k, v in asked.items() if k == "return_token_ids"},
            **ours,
        )
    extra = told.model_extra or {}
    [choice] = told.choices
    assert choice.message.content == "w11 w12 w13"
    wanted = any(asked.values())
    assert (choice.logprobs is not None) is wanted
    assert bool((choice.model_extra or {}).get("token_ids")) is wanted
    assert bool(extra.get("prompt_token_ids")) is wanted
    assert told.usage is not None
    [turn] = (await GatewayClient(gateway.url).fetch_async([session.session_id]))[session.session_id].turns
    assert turn.completion_ids == engine.calls[0].completion_ids[0]
    assert None not in turn.logprobs
