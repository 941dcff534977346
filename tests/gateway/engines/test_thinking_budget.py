"""The budget of an answer's thinking, asked with Anthropic's client: told to engines that hold one, never in the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.engines import thinking_budget
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

MODEL = str(Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights")
NOT_HELD = "agentcore-rl-not-held"
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 3000,
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "thinking": {"type": "enabled", "budget_tokens": 2048},
}
# What vLLM says where it was started without --reasoning-parser.
WHY = (
    "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-parser and/or "
    "--reasoning-config to use thinking_token_budget."
)
REFUSAL = {"error": {"message": WHY, "type": "BadRequestError", "param": None, "code": 400}}

Start = Callable[..., Awaitable[Gateway]]


def refusal(stream: bool) -> Fault:
    """vLLM has answered 200 by the time it looks at the parameters of a streamed request."""
    body = json.dumps(REFUSAL)
    if not stream:
        return Fault(status=400, body=body.encode())
    events = f"data: {body}\n\ndata: [DONE]\n\n".encode()
    return Fault(body=events, headers=(("content-type", "text/event-stream"),))


async def opened(gateway: Gateway, **settings: Any) -> SessionHandle:
    return (await GatewayClient(gateway.url).create_sessions_async([new_session_id()], **settings))[0]


async def ask(session: SessionHandle, stream: bool, **more: Any) -> tuple[anthropic.types.Message, str | None]:
    """The answer, and what its head says was not held."""
    root = session.base_url.removesuffix("/v1")
    asked = {**ASKED, **more}
    async with anthropic.AsyncAnthropic(base_url=root, api_key=session.api_key, max_retries=0) as llm:
        if stream:
            async with llm.messages.stream(**asked) as events:
                reply = await events.get_final_message()
                return reply, events.response.headers.get(NOT_HELD)
        raw = await llm.messages.with_raw_response.create(**asked)
        return await raw.parse(), raw.headers.get(NOT_HELD)


def start_kind(start_gateway: Start, engine: ScriptedEngine, kind: str, token_mode: bool) -> Awaitable[Gateway]:
    if not token_mode:
        return start_gateway(engine, engine=kind)
    engine.first_id, engine.last_id = 300, 500
    return start_gateway(engine, engine=kind, model_dir=MODEL)


def limits_of(body: dict[str, Any]) -> dict[str, Any]:
    """What an engine was told of budgets."""
    answer = {**body, **body.get("sampling_params", {})}
    return {k: answer[k] for k in ("thinking_token_budget", "custom_params", "require_reasoning") if k in answer}


async def turns(gateway: Gateway, session: SessionHandle) -> list[list[int]]:
    capture = (await GatewayClient(gateway.url).fetch_async([session.session_id]))[session.session_id]
    assert capture.errors == []
    return [turn.completion_ids for turn in capture.turns]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "token_mode", "expected"),
    [
        ("vllm", False, {"thinking_token_budget": 2048}),
        ("vllm", True, {"thinking_token_budget": 2048}),
        ("sglang", False, {"custom_params": {"thinking_budget": 2048}}),
        ("sglang", True, {"custom_params": {"thinking_budget": 2048}, "require_reasoning": True}),
    ],
)
async def test_engines_are_told_the_budget_in_their_own_words(
    engine: ScriptedEngine, start_gateway: Start, kind: str, token_mode: bool, expected: dict[str, Any], stream: bool
) -> None:
    gateway = await start_kind(start_gateway, engine, kind, token_mode)
    session = await opened(gateway)
    _, not_held = await ask(session, stream)
    assert not_held is None
    [call] = engine.calls
    assert limits_of(call.body) == expected
    assert await turns(gateway, session) == call.completion_ids
    assert gateway.counters["thinking_budgets_not_held"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token_mode", [False, True])
async def test_a_server_that_refuses_budgets_is_asked_without_and_is_not_asked_again(
    engine: ScriptedEngine,
    start_gateway: Start,
    token_mode: bool,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await start_kind(start_gateway, engine, "vllm", token_mode)
    session = await opened(gateway)
    engine.faults.append(refusal(stream))
    with caplog.at_level(logging.WARNING):
        reply, not_held = await ask(session, stream)
    assert (reply.stop_reason, not_held) == ("end_turn", "thinking.budget_tokens")
    assert "start vLLM with --reasoning-parser" in caplog.text
    _, not_held = await ask(session, stream)
    assert not_held == "thinking.budget_tokens"
    assert [limits_of(call.body) for call in engine.calls] == [{"thinking_token_budget": 2048}, {}, {}]
    assert len(await turns(gateway, session)) == 2
    assert gateway.counters["thinking_budgets_not_held"] == 2
    status, metrics = await request("GET", gateway.url + "/metrics")
    assert (status, b"thinking_budgets_not_held_total 2" in metrics) == (200, True)

    monkeypatch.setattr(thinking_budget, "ASK_AGAIN_S", 0.0)  # the server has been started anew, and long ago by now
    for worker in gateway.router.workers.values():
        thinking_budget.leave_out(worker)
    _, not_held = await ask(await opened(gateway), stream)
    assert (limits_of(engine.calls[-1].body), not_held) == ({"thinking_token_budget": 2048}, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "token_mode"), [("policy", True), ("openai", False)])
async def test_an_engine_that_knows_no_budgets_serves_the_call_and_the_reply_says_so(
    engine: ScriptedEngine, start_gateway: Start, kind: str, token_mode: bool, stream: bool
) -> None:
    gateway = await start_kind(start_gateway, engine, kind, token_mode)
    reply, not_held = await ask(await opened(gateway), stream)
    assert (reply.stop_reason, not_held) == ("end_turn", "thinking.budget_tokens")
    assert limits_of(engine.calls[0].body) == {}
    _, not_held = await ask(await opened(gateway), stream, thinking={"type": "adaptive"})
    assert not_held is None


async def test_an_error_that_is_not_about_the_budget_is_the_agents(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    session = await opened(await start_gateway(engine))
    engine.faults.append(Fault(status=400, body=b'{"error": {"message": "no such thing", "code": 400}}'))
    with pytest.raises(anthropic.BadRequestError, match="no such thing"):
        await ask(session, False)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("token_mode", [False, True])
async def test_what_the_session_says_of_the_budget_wins(
    engine: ScriptedEngine, start_gateway: Start, token_mode: bool
) -> None:
    gateway = await start_kind(start_gateway, engine, "vllm", token_mode)
    await ask(await opened(gateway, sampling_params={"thinking_token_budget": 99}), False)
    assert limits_of(engine.calls[0].body) == {"thinking_token_budget": 99}


async def test_vllms_own_field_of_a_chat_request_is_the_agents_affair(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    session = await opened(await start_kind(start_gateway, engine, "vllm", True))
    body = {"model": "m", "messages": ASKED["messages"], "thinking_token_budget": 7}
    status, _ = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    assert (status, limits_of(engine.calls[0].body)) == (200, {"thinking_token_budget": 7})
    engine.faults.append(refusal(False))
    status, answer = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    assert (status, WHY.encode() in answer) == (400, True)


async def test_vllms_own_field_is_a_400_where_the_engine_has_no_such_thing(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    session = await opened(await start_kind(start_gateway, engine, "policy", True))
    body = {"model": "m", "messages": ASKED["messages"], "thinking_token_budget": 7}
    status, answer = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "at least 1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3000}}, "less than max_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.type enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "a number"),
    ],
)
async def test_a_budget_that_cannot_be_is_a_400_that_names_it(
    session: SessionHandle, engine: ScriptedEngine, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(session, False, **asked)
    assert "thinking.budget_tokens" in str(caught.value)
    assert words in str(caught.value)
    assert engine.calls == []


async def test_with_tools_a_budget_may_be_for_several_answers(session: SessionHandle, engine: ScriptedEngine) -> None:
    tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    await ask(session, False, max_tokens=1500, tools=tools)
    assert limits_of(engine.calls[0].body) == {"thinking_token_budget": 2048}


async def test_tokens_of_a_request_with_a_budget_are_counted(session: SessionHandle) -> None:
    root = session.base_url.removesuffix("/v1")
    asked = {key: ASKED[key] for key in ("model", "messages", "thinking")}
    async with anthropic.AsyncAnthropic(base_url=root, api_key=session.api_key, max_retries=0) as llm:
        assert (await llm.messages.count_tokens(**asked)).input_tokens > 0
