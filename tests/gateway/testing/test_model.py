"""The scripted model behind the real gateway, called by the official clients: what it says arrives as it was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import ScriptedModel, ToolCall

from ..asking import Start, gpt

TEXT = "Two lines,\n\n  the second  indented.\n#### 1,042\n"
ARGUMENTS = {"expression": "2 + 3", "nested": {"list": [1, None, "a  b\nc"]}}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as running:
        yield running


@pytest.fixture
async def client(model: ScriptedModel, start_gateway: Start) -> GatewayClient:
    return GatewayClient((await start_gateway(model)).url)


async def chat(session: SessionHandle, messages: list[Any], stream: bool) -> tuple[str | None, list[tuple[str, str]]]:
    """(text, calls as name and arguments) of one turn by OpenAI's client."""
    tools: Any = [{"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}]
    async with gpt(session) as caller:
        if not stream:
            reply = await caller.chat.completions.create(model="m", messages=messages, tools=tools)
            assistant = reply.choices[0].message
            return assistant.content, [(c.function.name, c.function.arguments) for c in assistant.tool_calls or []]  # type: ignore[union-attr]
        text, calls = "", {}
        async for chunk in await caller.chat.completions.create(model="m", messages=messages, tools=tools, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    name, arguments = calls.get(call.index, ("", ""))
                    assert call.function is not None
                    calls[call.index] = (
                        name + (call.function.name or ""),
                        arguments + (call.function.arguments or ""),
                    )
        return text or None, list(calls.values())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_texts_and_calls_arrive_as_they_were_decided(
    model: ScriptedModel, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    asked: list[list[dict[str, Any]]] = []

    def decide(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
        asked.append(messages)
        assert [tool["function"]["name"] for tool in tools] == ["calculator"]
        if messages[-1]["content"] == "unparsable":
            return [ToolCall("calculator", '{"expression": ')]
        return [ToolCall("calculator", ARGUMENTS), ToolCall("other")] if len(messages) == 1 else TEXT

    model.decide = decide
    user = {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "2 + 3?"}]}
    text, calls = await chat(session, [user], stream)
    assert text is None
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("calculator", ARGUMENTS), ("other", {})]
    text, calls = await chat(session, [user, {"role": "user", "content": "and now?"}], stream)
    assert (text, calls) == (TEXT, [])
    assert asked[0] == [{"role": "user", "content": "what is 2 + 3?"}]
    _, calls = await chat(session, [{"role": "user", "content": "unparsable"}], stream)
    assert calls == [("calculator", '{"expression": ')]
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert len(capture.turns) == 3
    assert all(turn.trainable for turn in capture.turns)
    assert model.errors == []
