"""What a reply tells the agent of its numbers: those that it asked for, though the gateway has the engine tell all."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import Gateway, SessionHandle
from scripted_engine import ScriptedEngine

from ..asking import USER, captured, gpt

ASKED = [{}, {"logprobs": False}, {"logprobs": True, "top_logprobs": 1}, {"extra_body": {"return_token_ids": True}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "n"), [(asked, 1 + place % 2) for place, asked in enumerate(ASKED)])
async def test_an_agent_gets_the_numbers_it_asked_for(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, asked: dict[str, Any], n: int, stream: bool
) -> None:
    engine.replies.append({"content": "w11 w12 w13"})
    async with gpt(session) as llm:
        reply: Any = await llm.chat.completions.create(model="m", messages=USER, stream=stream, n=n, **asked)
        parts = [part async for part in reply] if stream else [reply]
    choices = [choice for part in parts for choice in part.choices]
    told = [choice.delta if stream else choice.message for choice in choices if choice.index == 0]
    assert "".join(message.content or "" for message in told) == "w11 w12 w13"
    wanted = any(asked.values())
    assert any(c.logprobs is not None for c in choices) is wanted
    assert any((c.model_extra or {}).get("token_ids") for c in choices) is wanted
    assert any((part.model_extra or {}).get("prompt_token_ids") for part in parts) is wanted
    turns = (await captured(gateway, session)).turns
    assert [turn.completion_ids for turn in turns] == engine.calls[0].completion_ids
    assert all(None not in turn.logprobs for turn in turns)
