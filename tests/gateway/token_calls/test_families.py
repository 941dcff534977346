"""A call of each newer model family reaches the official client of each API, in whole and in streamed replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.gateway import SessionHandle
from agentcore_rl_toolkit.messages.render import Renderer, sampled_body
from scripted_engine import ScriptedEngine

from ...messages.render.conftest import FAMILIES, write_model
from ..asking import Start, boto, captured, claude, gpt, opened
from ..calls.test_gemini import close_all, google, reply_of, types
from ..test_bedrock import address, whole

# Google's client subclasses aiohttp's session, and leaves it open.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]

INTEGER = {"type": "integer"}
SCHEMA: dict[str, Any] = {
    **{"type": "object", "properties": {"x": INTEGER, "y": INTEGER}, "required": ["x", "y"]},
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
ARGUMENTS = {"x": 1, "y": 3}
USER: Any = [{"role": "user", "content": "1 + 3?"}]
Calls = list[tuple[str, Any]]


async def chat(session: SessionHandle, *, stream: bool) -> Calls:
    asked: Any = {"model": "m", "messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}
    async with gpt(session) as llm:
        if stream:
            async with llm.chat.completions.stream(**asked) as events:
                reply: Any = await events.get_final_completion()
        else:
            reply = await llm.chat.completions.create(**asked)
    calls = reply.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def responses(session: SessionHandle, *, stream: bool) -> Calls:
    asked: Any = {"model": "m", "input": USER, "tools": [{"type": "function", **FUNCTION}]}
    async with gpt(session) as llm:
        if stream:
            async with llm.responses.stream(**asked) as events:
                reply: Any = await events.get_final_response()
        else:
            reply = await llm.responses.create(**asked)
    return [(item.name, json.loads(item.arguments)) for item in reply.output if item.type == "function_call"]


async def messages(session: SessionHandle, *, stream: bool) -> Calls:
    tools = [{"name": "add", "input_schema": SCHEMA}]
    asked: Any = {"model": "m", "max_tokens": 64, "messages": USER, "tools": tools}
    async with claude(session) as llm:
        if stream:
            async with llm.messages.stream(**asked) as events:
                reply: Any = await events.get_final_message()
        else:
            reply = await llm.messages.create(**asked)
    return [(block.name, block.input) for block in reply.content if block.type == "tool_use"]


async def converse(session: SessionHandle, *, stream: bool) -> Calls:
    keys = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "x", "region_name": "us-west-2"}
    llm = boto(**keys).client("bedrock-runtime", endpoint_url=address(session))
    tools = {"tools": [{"toolSpec": {"name": "add", "inputSchema": {"json": SCHEMA}}}]}
    asked = [{"role": "user", "content": [{"text": "1 + 3?"}]}]
    reply = await whole(llm, stream=stream, messages=asked, toolConfig=tools)
    await asyncio.to_thread(llm.close)
    calls = [block["toolUse"] for block in reply["content"] if "toolUse" in block]
    return [(call["name"], call["input"]) for call in calls]


async def gemini(session: SessionHandle, *, stream: bool) -> Calls:
    declared = types.FunctionDeclaration(name="add", description="Adds.", parameters_json_schema=SCHEMA)
    tools = [types.Tool(function_declarations=[declared])]
    parts, _ = await reply_of(google(session), "1 + 3?", stream=stream, tools=tools)
    await close_all()
    return [(part.function_call.name, part.function_call.args) for part in parts if part.function_call]


APIS: tuple[Callable[..., Any], ...] = (chat, responses, messages, converse, gemini)


# By day, one API for each family.
PAIRS: list[tuple[str, Callable[..., Any]]] = [("gemma", chat), ("kimi", responses), ("lfm", messages)]
PAIRS += [("minimax", converse), ("mistral", gemini), ("muse", chat)]


@pytest.mark.parametrize(
    ("family", "apis"),
    [(family, [api]) for family, api in PAIRS] + [pytest.param(f, APIS, marks=pytest.mark.nightly) for f, _ in PAIRS],
)
async def test_a_call_of_a_family_reaches_the_client_of_each_api(
    family: str, apis: Sequence[Callable[..., Any]], engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    model = write_model(FAMILIES[family], tmp_path / family)
    gateway = await start_gateway(engine, model_dir=str(model))
    function = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "function": function}]}
    tools = [{"type": "function", "function": FUNCTION}]
    ids = sampled_body(Renderer.from_path(model), answer, tools=tools)
    assert ids
    for api in apis:
        for stream in (False, True):
            engine.replies.append({"token_ids": ids})
            session = await opened(gateway)
            assert await api(session, stream=stream) == [("add", ARGUMENTS)], (api.__name__, stream)
            [turn] = (await captured(gateway, session)).turns
            assert (turn.completion_ids, turn.parse_status) == (ids, "parsed")
            assert turn.prompt_ids == engine.calls[-1].prompt_ids
