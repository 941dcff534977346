"""Calls of tools whose arguments are JSON to Python and not to others, from engine to agent and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.gateway import SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

MODEL = Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights"
OWN = '{"x":  NaN, "y": [-Infinity, 1e999, 1.50], "text": "NaN \\" Infinity", "big": 12345678901234567890}'
MEANT = {"x": "NaN", "y": ["-Infinity", "Infinity", 1.5], "text": 'NaN " Infinity', "big": 12345678901234567890}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


async def called(session: SessionHandle, dialect: str, stream: bool, history: list[Any]) -> tuple[Any, list[Any]]:
    """A call as the provider's own client gives it, and the history to go on with."""
    if dialect == "anthropic":
        base = session.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base, api_key=session.api_key, max_retries=0) as claude:
            asked: Any = {"model": "m", "max_tokens": 99, "messages": history}
            asked["tools"] = [{"name": "f", "input_schema": SCHEMA}]
            if stream:
                async with claude.messages.stream(**asked) as events:
                    response = await events.get_final_message()
            else:
                response = await claude.messages.create(**asked)
        [block] = [b for b in response.content if b.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        content = [
            b.model_dump(exclude_none=True, include={"type", "id", "name", "input", "text"}) for b in response.content
        ]
        return block.input, [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as llm:
        if dialect == "responses":
            tools: Any = [{"type": "function", "name": "f", "parameters": SCHEMA}]
            if stream:
                async with llm.responses.stream(model="m", input=history, tools=tools) as answer:
                    reply = await answer.get_final_response()
            else:
                reply = await llm.responses.create(model="m", input=history, tools=tools)
            [item] = [i for i in reply.output if i.type == "function_call"]
            call = {"type": "function_call", "call_id": item.call_id, "name": "f", "arguments": item.arguments}
            return item.arguments, [call, {"type": "function_call_output", "call_id": item.call_id, "output": "done"}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
        asked = {"model": "m", "messages": history, "tools": tools}
        if stream:
            events = [e async for e in await llm.chat.completions.create(**asked, stream=True)]
            parts = [c for e in events for choice in e.choices for c in choice.delta.tool_calls or ()]
            call_id, text = parts[0].id, "".join([c.function.arguments or "" for c in parts if c.function])
        else:
            [made] = (await llm.chat.completions.create(**asked)).choices[0].message.tool_calls
            call_id, text = made.id, made.function.arguments
        back = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": text}}
        result = {"role": "tool", "tool_call_id": call_id, "content": "done"}
        return text, [{"role": "assistant", "tool_calls": [back]}, result]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_bodies_are_json_to_every_reader(
    stream: bool, engine: ScriptedEngine, session: SessionHandle
) -> None:
    engine.replies.append(
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": OWN}}]}
    )
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    asked["tools"] = [{"name": "f", "input_schema": SCHEMA}]
    status, reply = await request("POST", session.base_url + "/messages", body=asked, key=session.api_key)
    assert status == 200
    if stream:
        events = [msgspec.json.decode(line[6:]) for line in reply.split(b"\n") if line.startswith(b"data: ")]
        pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
        assert msgspec.json.decode("".join(pieces)) == MEANT
    else:
        assert msgspec.json.decode(reply)["content"][0]["input"] == MEANT
