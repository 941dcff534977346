"""What the APIs promise, asked with the providers' own clients: every field reaches the engine, every part comes back."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, ask, captured, claude, gpt, opened

USER = [{"role": "user", "content": "hi"}]
PNG = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": f'{{"x": {i}}}'}}
    for i, name in enumerate(["add", "mul"])
]


class Point(BaseModel):
    x: int
    y: int


async def recorded(client: GatewayClient, session: SessionHandle, engine: ScriptedEngine) -> None:
    """Every call became turns with exactly the sampled tokens, and none failed."""
    capture = await captured(client, session)
    assert [t.completion_ids for t in capture.turns] == [ids for seen in engine.calls for ids in seen.completion_ids]
    assert capture.errors == []


async def test_chat_tools_choices_and_sampling(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "mul")]
    choices: Any = ["required", "none", {"type": "function", "function": {"name": "add"}}]
    async with gpt(session) as llm:
        for choice in choices:
            engine.replies.append({"content": "w1 w2", "tool_calls": CALLS, "reasoning_content": "hmm"})
            reply = await llm.chat.completions.create(
                model="m",
                messages=USER,  # type: ignore[arg-type]
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=True,
                seed=3,
                stop=["zz"],
                temperature=0.5,
                top_p=0.9,
            )
            message = reply.choices[0].message
            assert [call.function.name for call in message.tool_calls or []] == ["add", "mul"]
            assert message.content == "w1 w2"
            assert message.model_extra is not None
            assert message.model_extra["reasoning_content"] == "hmm"
            body = engine.calls[-1].body
            assert (body["tool_choice"], body["tools"], body["parallel_tool_calls"]) == (choice, tools, True)
            assert (type(body["seed"]), body["stop"], body["temperature"], body["top_p"]) == (int, ["zz"], 0.5, 0.9)
    await recorded(client, session, engine)


async def test_json_schemas_reach_the_engine_and_are_parsed_by_each_client(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    engine.replies.extend([{"content": '{"x": 1, "y": 2}'}] * 3)
    async with gpt(session) as llm, claude(session) as other:
        chat = await llm.chat.completions.parse(model="m", messages=USER, response_format=Point)  # type: ignore[arg-type]
        assert chat.choices[0].message.parsed == Point(x=1, y=2)
        assert (await llm.responses.parse(model="m", input="hi", text_format=Point)).output_parsed == Point(x=1, y=2)
        message = await other.messages.parse(model="m", max_tokens=50, messages=USER, output_format=Point)  # type: ignore[arg-type]
        assert message.parsed_output == Point(x=1, y=2)
    for seen in engine.calls:
        assert seen.body["response_format"]["json_schema"]["schema"]["required"] == ["x", "y"]
    await recorded(client, session, engine)


async def test_images_reach_the_engine_from_every_dialect(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    image = {"type": "image_url", "image_url": {"url": PNG}}
    source = {"type": "base64", "media_type": "image/png", "data": PNG.split(",")[1]}
    async with gpt(session) as llm, claude(session) as other:
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]
        await llm.chat.completions.create(model="m", messages=parts)
        blocks: Any = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
        await other.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": blocks}])
        items: Any = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": PNG}]
        await llm.responses.create(model="m", input=[{"role": "user", "content": items}])
    assert [seen.body["messages"][0]["content"] for seen in engine.calls] == [
        [{"type": "text", "text": "see"}, image]
    ] * 3
    await recorded(client, session, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_tools_thinking_and_stop_reasons(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in ("add", "mul")]
    async with claude(session) as llm:

        async def ask(**more: Any) -> anthropic.types.Message:
            asked: Any = {"model": "m", "max_tokens": 50, "messages": USER, **more}
            if not stream:
                return await llm.messages.create(**asked)
            async with llm.messages.stream(**asked) as events:
                return await events.get_final_message()

        engine.replies.append({"content": None, "tool_calls": CALLS})
        choice = {"type": "any", "disable_parallel_tool_use": True}
        extra = {"top_k": 4, "temperature": 0.5}
        reply = await ask(tools=tools, tool_choice=choice, stop_sequences=["zz"], extra_body=extra)
        assert reply.stop_reason == "tool_use"
        assert [(b.name, b.input) for b in reply.content if b.type == "tool_use"] == [
            ("add", {"x": 0}),
            ("mul", {"x": 1}),
        ]
        body = engine.calls[0].body
        assert (body["tool_choice"], body["parallel_tool_calls"], body["stop"]) == ("required", False, ["zz"])
        assert (body["top_k"], body["temperature"], body["max_tokens"]) == (4, 0.5, 50)
        engine.replies.append({"content": "w1", "reasoning_content": "hmm"})
        thought = await ask(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [b.type for b in thought.content] == ["thinking", "text"]
        assert engine.calls[1].body["chat_template_kwargs"] == {"enable_thinking": True}

        def stopped(chunk: dict[str, Any]) -> dict[str, Any]:
            for choice in chunk["choices"]:
                choice["stop_reason"] = "zz"
            return chunk

        engine.faults.append(Fault(edit=stopped))
        ended = await ask(stop_sequences=["zz"])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "zz")
        assert (await ask(max_tokens=3)).stop_reason == "max_tokens"
        # vLLM's and OpenAI's chats end the call of a named tool with "stop".
        engine.replies.append({"content": None, "tool_calls": CALLS[:1], "finish_reason": "stop"})
        assert (await ask(tools=tools, tool_choice={"type": "tool", "name": "add"})).stop_reason == "tool_use"
    await recorded(client, session, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tools_reasoning_and_logprobs(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("add", "mul")]
    async with gpt(session) as llm:

        async def ask(**more: Any) -> Any:
            if not stream:
                return await llm.responses.create(model="m", **more)
            async with llm.responses.stream(model="m", **more) as events:
                async for _ in events:
                    pass
                return await events.get_final_response()

        engine.replies.append({"content": None, "tool_calls": CALLS})
        limits = {"max_output_tokens": 50, "temperature": 0.3, "parallel_tool_calls": True}
        reply = await ask(
            input="hi",
            instructions="be brief",
            tools=tools,
            tool_choice="required",
            reasoning={"effort": "low"},
            **limits,
        )
        assert [(i.name, i.arguments) for i in reply.output] == [("add", '{"x": 0}'), ("mul", '{"x": 1}')]
        body = engine.calls[0].body
        assert (body["tool_choice"], body["reasoning_effort"], body["max_tokens"]) == ("required", "low", 50)
        outputs = [{"type": "function_call_output", "call_id": i.call_id, "output": "3"} for i in reply.output]
        history = [
            {"role": "user", "content": "hi"},
            *[i.model_dump(exclude_none=True) for i in reply.output],
            *outputs,
        ]
        engine.replies.append({"content": "w1 w2", "reasoning_content": "hmm"})
        final = await ask(input=history, tools=tools, include=["message.output_text.logprobs"])
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert len(final.output[1].content[0].logprobs) == len(engine.calls[1].completion_ids[0])
        roles = [message["role"] for message in engine.calls[1].body["messages"]]
        assert roles == ["user", "assistant", "tool", "tool"]
    await recorded(client, session, engine)


async def test_fields_nobody_can_honour_are_named_in_every_dialect(session: SessionHandle) -> None:
    async with gpt(session) as llm, claude(session) as other:
        for field, value in (("functions", [{"name": "f"}]), ("rid", "another's")):
            with pytest.raises(openai.BadRequestError) as chat:
                await llm.chat.completions.create(model="m", messages=USER, extra_body={field: value})  # type: ignore[arg-type]
            assert (chat.value.param, chat.value.code) == (field, "unsupported_parameter")
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await llm.completions.create(model="m", prompt="a")
        with pytest.raises(openai.BadRequestError) as answer:
            await llm.responses.create(model="m", input="x", previous_response_id="resp_1")
        assert answer.value.param == "previous_response_id"
        thread = {"thread": {"id": "t"}}
        with pytest.raises(anthropic.BadRequestError, match="thread"):
            await other.messages.create(model="m", max_tokens=5, messages=USER, extra_body=thread)  # type: ignore[arg-type]


async def test_a_field_of_the_operators_engine_passes_in_every_dialect_and_others_are_left_out(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    for model in (None, str(MODEL)):
        gateway = await start_gateway(engine, allow_fields=("wings",), model_dir=model)
        session = await opened(gateway)
        engine.first_id, engine.last_id = 300, 500
        more = {"wings": 2, "claws": 2}
        async with gpt(session) as llm, claude(session) as other:
            await llm.chat.completions.create(model="m", messages=USER, extra_body=more)  # type: ignore[arg-type]
            await llm.responses.create(model="m", input="x", extra_body=more)
            await other.messages.create(model="m", max_tokens=5, messages=USER, extra_body=more)  # type: ignore[arg-type]
        asked = [call.body.get("sampling_params", call.body) for call in engine.calls[-3:]]
        assert [(body.get("wings"), body.get("claws")) for body in asked] == [(2, None)] * 3


@pytest.mark.parametrize(
    ("kind", "asked", "param"),
    [
        ("vllm", {"regex": "a"}, "regex"),
        ("vllm", {"stop_regex": "a"}, "stop_regex"),
        ("vllm", {"regex": None, "ebnf": "", "bad_words": ["a"]}, None),
        ("openai", {"regex": "a", "structured_outputs": {}}, None),
    ],
)
async def test_a_field_that_an_engine_would_pass_over_is_refused(
    engine: ScriptedEngine,
    start_gateway: Start,
    kind: str,
    asked: dict[str, Any],
    param: str | None,
) -> None:
    engine.gives_tokens = kind != "openai"
    gateway = await start_gateway(engine, engine=kind)
    session = await opened(gateway)
    status, raw = await ask(session, max_tokens=4, **asked)
    reply = json.loads(raw)
    assert (status, len(engine.calls)) == ((400, 0) if param else (200, 1)), reply
    if param:
        assert reply["error"]["param"] == param
        capture = await captured(gateway, session)
        assert capture.turns == []
        assert [(e["status"], e["field"]) for e in capture.errors] == [("refused", param)]
