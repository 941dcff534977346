"""A real Strands agent with a tool, through the gateway."""

from __future__ import annotations

import asyncio

import pytest
from strands import Agent, tool
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 3}'}}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_strands_agent_uses_a_tool_and_every_token_is_recorded(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    asked: list[tuple[int, int]] = []

    @tool
    def add(x: int, y: int) -> int:
        """Add two numbers."""
        asked.append((x, y))
        return x + y

    engine.replies.extend([{"content": None, "tool_calls": [CALL]}, {"content": "w5"}])
    model = OpenAIModel(
        client_args={"base_url": session.base_url, "api_key": session.api_key, "max_retries": 0},
        model_id="m",
        params={"max_tokens": 64},
    )
    agent = Agent(model=model, tools=[add], system_prompt="be brief", callback_handler=None)
    result = await asyncio.wait_for(agent.invoke_async("what is 2 + 3"), 30)
    assert str(result).strip() == "w5"
    assert asked == [(2, 3)]
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert [t.completion_ids for t in capture.turns] == [r.completion_ids[0] for r in engine.calls]
    assert [m["role"] for m in capture.dialogue] == ["system", "user", "assistant", "tool", "assistant"]
    assert capture.errors == []
