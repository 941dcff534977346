"""Details of the protocols that only show with the providers' own clients: bounds, positions, states, who is named at fault."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.types.exceptions import ContextWindowOverflowException

from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing.engine import error_body
from agentcore_rl_toolkit.messages.render import Renderer
from scripted_engine import Fault, ScriptedEngine

from ..asking import MODEL, Start, ask, captured, claude, gpt, opened, status_of

USER: Any = [{"role": "user", "content": "What is 2 + 3?"}]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION = {"name": "calculator", "description": "computes", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [{"name": "calculator", "input_schema": PARAMETERS}]


@pytest.fixture
def rendered(engine: ScriptedEngine, start_gateway: Start) -> Callable[..., Awaitable[SessionHandle]]:
    """Open a session on a gateway that renders prompts itself: ``await rendered(context_tokens=..., max_tokens=...)``."""

    async def start(*, context_tokens: int | None = None, kind: str = "vllm", **settings: Any) -> SessionHandle:
        engine.first_id, engine.last_id = 300, 500
        gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL), context_tokens=context_tokens)
        return await opened(gateway, **settings)

    return start


Rendered = Callable[..., Awaitable[SessionHandle]]


def says(engine: ScriptedEngine, text: str) -> None:
    renderer = Renderer.from_path(str(MODEL))
    ids = renderer.encode(text)
    engine.replies.append({"token_ids": [*ids, min(renderer.stop_token_ids)]})


# -- the window


async def test_an_answer_that_does_not_fit_is_not_called_a_prompt_that_is_too_long(
    engine: ScriptedEngine, rendered: Rendered
) -> None:
    session = await rendered(context_tokens=100)
    async with gpt(session) as llm, claude(session) as other:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as chat:
            await llm.chat.completions.create(model="m", messages=USER, max_tokens=500)
        assert "prompt is too long" not in chat.value.message
        assert (chat.value.code, chat.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError) as responses:
            await llm.responses.create(model="m", input="hi " * 200)
        assert (responses.value.code, responses.value.param) == ("context_length_exceeded", "input")
        # Words that agents on this provider look for: of a prompt alone, and of a prompt together with its answer.
        with pytest.raises(anthropic.BadRequestError, match="input and output tokens exceed your context limit"):
            await other.messages.create(model="m", messages=USER, max_tokens=500)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await other.messages.create(model="m", messages=[{"role": "user", "content": "hi " * 200}], max_tokens=5)


async def test_an_answer_may_fill_the_window(engine: ScriptedEngine, rendered: Rendered) -> None:
    session = await rendered(context_tokens=100)
    status, reply = await ask(session)
    room = 100 - json.loads(reply)["usage"]["prompt_tokens"]
    assert (status, engine.calls[0].body["sampling_params"]["max_tokens"]) == (200, room)
    assert [await status_of(session, max_tokens=room + more) for more in (0, 1)] == [200, 400]
    assert [await status_of(await rendered(context_tokens=100 - room + more)) for more in (0, 1)] == [400, 200]


async def test_an_agent_knows_an_engines_overflow_for_what_it_is(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    """As an agent of Strands does, which then makes its history shorter: by code or, with Anthropic, by words."""
    url, key = session.base_url, session.api_key
    root: Any = {"base_url": url.removesuffix("/v1"), "api_key": key, "max_retries": 0}
    keyed: Any = {"base_url": url, "api_key": key, "max_retries": 0}
    claudes = AnthropicModel(client_args=root, model_id="m", max_tokens=5)
    models = [claudes, OpenAIModel(client_args=keyed, model_id="m")]
    reply = error_body(400, "This model's maximum context length is 10 tokens. However, you requested 20 tokens.")
    for model in models:
        engine.faults.append(Fault(status=400, body=reply))
        with pytest.raises(ContextWindowOverflowException):
            _ = [event async for event in model.stream([{"role": "user", "content": [{"text": "hi"}]}])]
    await claudes.client.close()
    assert {error["type"] for error in (await captured(client, session)).errors} == {"context_overflow"}


LATE = {"message": "The input (9 tokens) is longer than the model's context length (5 tokens)."}


NAMED = {**LATE, "type": "BadRequestError", "param": None, "code": 400}


@pytest.mark.parametrize("wanted", [LATE, pytest.param(NAMED, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "renders", "dialect"),
    [
        ("vllm", False, "chat"),
        ("vllm", False, "anthropic"),
        ("vllm", True, "chat"),
        ("sglang", True, "chat"),
        ("sglang", True, "responses"),
        ("sglang", True, "anthropic"),
    ],
)
async def test_an_overflow_that_the_engine_tells_within_its_stream_is_a_400(
    engine: ScriptedEngine, start_gateway: Start, kind: str, renders: bool, dialect: str, wanted: dict[str, Any]
) -> None:
    gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL) if renders else None)
    session = await opened(gateway)
    event = b"data: " + json.dumps({"error": wanted}).encode() + b"\n\ndata: [DONE]\n\n"
    engine.faults.append(Fault(body=event, headers=(("content-type", "text/event-stream"),)))
    async with gpt(session) as llm, claude(session) as other:
        asks: dict[str, Callable[[], Awaitable[Any]]] = {
            "chat": lambda: llm.chat.completions.create(model="m", messages=USER, stream=True),
            "responses": lambda: llm.responses.create(model="m", input="hi", stream=True),
            "anthropic": lambda: other.messages.create(model="m", messages=USER, max_tokens=5, stream=True),
        }
        expected = anthropic.BadRequestError if dialect == "anthropic" else openai.BadRequestError
        with pytest.raises(expected, match=r"longer than the model's context length \(5 tokens\)") as caught:
            await asks[dialect]()
    if isinstance(caught.value, openai.BadRequestError):
        assert caught.value.code == "context_length_exceeded"
    else:
        assert "'message': \"prompt is too long: The input (9 tokens)" in caught.value.message
    [error] = (await captured(gateway, session)).errors
    assert (error["http_status"], error["type"]) == (400, "context_overflow")


async def test_vllm_gets_the_reasoning_of_the_history_under_both_of_its_names(
    engine: ScriptedEngine, session: SessionHandle
) -> None:
    """vLLM 0.12 and later read ``reasoning`` and drop ``reasoning_content``, which the templates of older ones read."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    engine.replies.append({"content": None, "reasoning_content": "two sums", "tool_calls": [call]})
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    asked: Any = {"model": "m", "max_tokens": 2000, "tools": tools, "thinking": {"type": "adaptive"}}
    async with claude(session) as llm:
        reply = await llm.messages.create(messages=USER, **asked)
        result: Any = [{"type": "tool_result", "tool_use_id": "call_1", "content": "5"}]
        history: Any = [*USER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": result}]
        await llm.messages.create(messages=history, **asked)
    answer = engine.calls[1].body["messages"][1]
    assert (answer["reasoning"], answer["reasoning_content"]) == ("two sums", "two sums")


# -- tools


@pytest.mark.parametrize(("kept", "stream"), [("content", True), ("encrypted_content", False)])
async def test_reasoning_comes_back_by_whichever_part_of_its_item_a_client_keeps(
    engine: ScriptedEngine, session: SessionHandle, stream: bool, kept: str
) -> None:
    engine.replies.append({"content": "w1", "reasoning_content": "naïve, at first"})
    asked: Any = {"model": "m", "include": ["reasoning.encrypted_content"], "store": False}
    async with gpt(session) as llm:
        if stream:
            async with llm.responses.stream(input="hi", **asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await llm.responses.create(input="hi", **asked)
        [reasoning, message] = [item.model_dump(exclude_none=True) for item in answer.output]
        item: Any = {"type": "reasoning", "id": reasoning["id"], "summary": [], kept: reasoning[kept]}
        await llm.responses.create(input=[*USER, item, message, *USER], **asked)
        assert engine.calls[-1].body["messages"][1]["reasoning_content"] == "naïve, at first"
        # What another provider sealed cannot be read, and what was only begun is none.
        for foreign in ("gAAAAABo", "base64:!", "base64:/w==", ""):
            item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": foreign}
            await llm.responses.create(input=[*USER, item, message, *USER], **asked)
            assert "reasoning_content" not in engine.calls[-1].body["messages"][1]


@pytest.mark.parametrize("mode", ["relay", "token"])
async def test_a_tools_schema_may_have_numbers_of_more_than_64_bits(
    engine: ScriptedEngine, start_gateway: Start, mode: str
) -> None:
    gateway = await start_gateway(engine, model_dir=str(MODEL) if mode == "token" else None)
    session = await opened(gateway)
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}}
    tools = [{"type": "function", "function": {**FUNCTION, "parameters": schema}}]
    assert await status_of(session, tools=tools, metadata={"a": 10**30}) == 200
    assert (await captured(gateway, session)).turns[0].tools == ("calculator",)


@pytest.mark.parametrize("dialect", ["chat/completions", "messages", "responses"])
async def test_a_stream_without_silence_has_events_only(gateway: Gateway, session: SessionHandle, dialect: str) -> None:
    fields = {"input": USER} if dialect == "responses" else {"messages": USER, "max_tokens": 8}
    body = {"model": "m", "stream": True, **fields}
    url = f"{session.base_url}/{dialect}"
    status, reply = await request("POST", url, body=body, key=session.api_key, timeout_s=60)
    assert status == 200
    assert all(line.startswith((b"data: ", b"event: ")) for line in reply.splitlines() if line)
