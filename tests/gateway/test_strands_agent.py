"""Real Strands agents with tools, through the gateway, with each of Strands' models that speaks one of its dialects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import ScriptedEngine


class Answer(BaseModel):
    total: int


def model_of(kind: str, session: SessionHandle) -> Any:
    args: dict[str, Any] = {"base_url": session.base_url, "api_key": session.api_key, "max_retries": 0}
    if kind == "chat":
        return OpenAIModel(client_args=args, model_id="m", params={"max_tokens": 64})
    if kind == "responses":
        return OpenAIResponsesModel(client_args=args, model_id="m")
    return AnthropicModel(
        client_args={**args, "base_url": session.base_url.removesuffix("/v1")}, model_id="m", max_tokens=64
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["chat", pytest.param("responses", marks=pytest.mark.nightly), "anthropic"])
async def test_a_strands_agent_uses_tools_and_every_token_is_recorded(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, kind: str
) -> None:
    asked: list[tuple[int, int]] = []

    @tool
    def add(x: int, y: int) -> int:
        """Add two numbers."""
        asked.append((x, y))
        return x + y

    calls = [
        {"id": f"call_{x}", "type": "function", "function": {"name": "add", "arguments": f'{{"x": {x}, "y": 3}}'}}
        for x in (1, 2)
    ]
    answer = {"id": "call_9", "type": "function", "function": {"name": "Answer", "arguments": '{"total": 7}'}}
    engine.replies.extend([{"content": None, "tool_calls": calls}, {"content": "w5"}])
    model = model_of(kind, session)
    agent = Agent(model=model, tools=[add], system_prompt="be brief", callback_handler=None)
    result = await asyncio.wait_for(agent.invoke_async("what is 1 + 3, and 2 + 3"), 30)
    assert str(result).strip() == "w5"
    assert sorted(asked) == [(1, 3), (2, 3)]
    engine.replies.append({"content": None, "tool_calls": [answer]})
    result = await asyncio.wait_for(agent.invoke_async("and both", structured_output_model=Answer), 30)
    assert result.structured_output == Answer(total=7)
    if kind == "anthropic":
        await model.client.close()  # this one keeps its client; the others make one for each call

    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert capture.errors == []
    assert [t.completion_ids for t in capture.turns] == [r.completion_ids[0] for r in engine.calls]
    assert [t.parse_status for t in capture.turns] == ["parsed", "none", "parsed"]
    roles = [m["role"] for m in capture.dialogue]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert len(build_trajectory(session.session_id, capture.turns).sequences) == 1


async def test_results_of_parallel_calls_are_in_the_order_of_the_calls(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    """Strands sends the errors of misnamed calls first, and most chat templates write no ids."""

    @tool
    def add() -> str:
        """Add."""
        return "one"

    names = {"call_1": "add", "call_2": "add it up"}
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}} for i, n in names.items()]
    engine.replies.extend([{"content": None, "tool_calls": calls}, {"content": "w5"}])
    model = model_of("anthropic", session)
    agent = Agent(model=model, tools=[add], callback_handler=None)
    await asyncio.wait_for(agent.invoke_async("both"), 30)
    await model.client.close()
    sent = agent.messages[2]["content"]
    assert [part["toolResult"]["toolUseId"] for part in sent] == ["call_2", "call_1"]
    results = [message for message in engine.calls[1].body["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call_1", "call_2"]
