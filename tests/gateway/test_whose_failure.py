"""Whose failure it is when a model call through the gateway fails: real clients and frameworks, real errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

from agentcore_rl_toolkit.app.causes import Blame, blame
from agentcore_rl_toolkit.contract import Cause, new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.capture.reply import ReplyReader
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.messages.render import Conversation, Renderer
from agentcore_rl_toolkit.messages.wire import Dialect
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from .asking import MODEL, Start, ask, captured, claude, gpt, opened, status_of

USER = [{"role": "user", "content": "hello"}]
INFRASTRUCTURE = Blame(cause=Cause.INFRASTRUCTURE)
OVERFLOW = b'{"error": {"message": "This model\'s maximum context length is 8 tokens", "code": 400}}'

Call = Callable[[SessionHandle], Awaitable[Any]]


def failed_at(failure: str) -> Blame:
    return Blame(cause=Cause.POLICY, failure=failure)


async def by_openai(session: SessionHandle, stream: bool = False) -> None:
    async with gpt(session) as client:
        reply = await client.chat.completions.create(model="m", messages=USER, max_tokens=4, stream=stream)  # type: ignore[call-overload]
        if stream:
            async for _ in reply:
                pass


async def by_openai_streamed(session: SessionHandle) -> None:
    await by_openai(session, stream=True)


async def by_responses(session: SessionHandle) -> None:
    async with gpt(session) as client:
        await client.responses.create(model="m", input="hello", max_output_tokens=4)


async def by_anthropic(session: SessionHandle) -> None:
    async with claude(session) as client:
        await client.messages.create(model="m", max_tokens=4, messages=USER)  # type: ignore[arg-type]


async def by_httpx(session: SessionHandle) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}, timeout=20) as client:
        reply = await client.post(f"{session.base_url}/chat/completions", json={"model": "m", "messages": USER})
        reply.raise_for_status()


async def by_urllib(session: SessionHandle) -> None:
    headers = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
    body = json.dumps({"model": "m", "messages": USER}).encode()
    request = urllib.request.Request(f"{session.base_url}/chat/completions", data=body, headers=headers)

    def call() -> None:
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                reply.read()
        except urllib.error.HTTPError as e:
            e.close()
            raise

    await asyncio.to_thread(call)


@tool
def look() -> str:
    """Look again."""
    return "w1"


async def by_strands(session: SessionHandle, tokens: int = 4) -> None:
    args = {"base_url": session.base_url, "api_key": session.api_key, "max_retries": 0}
    model = OpenAIModel(client_args=args, model_id="m", params={"max_tokens": tokens})
    agent = Agent(model=model, tools=[look], callback_handler=None, retry_strategy=None)
    await agent.invoke_async("hello")


async def by_strands_anthropic(session: SessionHandle) -> None:
    args = {"base_url": session.base_url.removesuffix("/v1"), "api_key": session.api_key, "max_retries": 0}
    model = AnthropicModel(client_args=args, model_id="m", max_tokens=4)
    try:
        await Agent(model=model, callback_handler=None, retry_strategy=None).invoke_async("hello")
    finally:
        await model.client.close()


EVERYONE: list[Call] = [
    by_openai,
    by_openai_streamed,
    by_responses,
    by_anthropic,
    by_httpx,
    by_urllib,
    by_strands,
    by_strands_anthropic,
]


def raises(error: BaseException) -> Callable[..., Any]:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


async def failure_of(call: Call, session: SessionHandle) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (which one it is says `blame`)
        await asyncio.wait_for(call(session), 30)
    return caught.value


@pytest.mark.parametrize("call", EVERYONE, ids=lambda call: call.__name__)
async def test_every_client_and_framework_raises_errors_that_say_whose_failure_it_is(
    call: Call, engine: ScriptedEngine, client: GatewayClient, gateway: Gateway, session: SessionHandle
) -> None:
    async def found(session: SessionHandle, **fault: Any) -> Blame:
        engine.faults.clear()
        engine.faults.extend([Fault(**fault)] * 4 if fault else ())
        return blame(await failure_of(call, session))

    # What urllib raises carries the answer's first line only; by hand one says `PolicyFailure("context")`.
    unsaid = Blame(cause=Cause.AGENT) if call is by_urllib else None
    assert await found(session, status=400, body=OVERFLOW) == (unsaid or failed_at("context"))
    for status in (500, 502, 503, 504, 429):
        assert await found(session, status=status) == INFRASTRUCTURE, status
    assert await found(session, status=500, body=OVERFLOW) == INFRASTRUCTURE
    asked = len(engine.calls)
    [spent, closed] = await client.create_sessions_async([new_session_id(), new_session_id()], max_turns=0)
    assert await found(spent) == (unsaid or failed_at("turns"))
    await client.fetch_async([closed.session_id])
    if call not in (by_urllib, by_httpx):
        assert await found(closed) == INFRASTRUCTURE
    assert len(engine.calls) == asked
    await gateway.stop(grace_s=0)
    assert await found(session) == INFRASTRUCTURE


async def test_a_stream_that_breaks_off_is_the_infrastructures(engine: ScriptedEngine, session: SessionHandle) -> None:
    engine.faults.append(Fault(drop_after=400))
    assert blame(await failure_of(by_openai_streamed, session)) == INFRASTRUCTURE


async def test_a_strands_agent_that_rambles_is_the_policys_and_its_turn_is_kept_whole(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    engine.tokens = 40
    assert blame(await failure_of(by_strands, session)) == failed_at("tokens")
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    [turn] = capture.turns
    assert turn.finish_reason == "length"
    assert turn.completion_ids == engine.calls[0].completion_ids[0]
    [sequence] = build_trajectory(session.session_id, capture.turns).sequences
    assert sequence.loss_mask == [0] * len(turn.prompt_ids) + [1] * 4


async def test_a_cut_answer_that_openai_parses_is_the_policys(engine: ScriptedEngine, session: SessionHandle) -> None:
    class Answer(BaseModel):
        total: int

    async def parse(session: SessionHandle) -> None:
        async with gpt(session) as client:
            await client.chat.completions.parse(model="m", messages=USER, max_tokens=4, response_format=Answer)  # type: ignore[arg-type]

    engine.tokens = 40
    assert blame(await failure_of(parse, session)) == failed_at("tokens")


async def test_a_request_that_is_wrong_is_the_agents(engine: ScriptedEngine, session: SessionHandle) -> None:
    engine.faults.append(Fault(status=400))
    assert blame(await failure_of(by_openai, session)) == Blame(cause=Cause.AGENT)


async def test_a_prompt_that_the_gateway_cannot_render_is_the_infrastructures_and_logged(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "faulty.jinja"
    fault = "{% if messages[-1].content == 'hello' %}{{ 1 // (messages | length - messages | length) }}{% endif %}"
    template.write_text((MODEL / "chat_template.jinja").read_text() + fault)
    gateway = await start_gateway(engine, model_dir=str(MODEL), template=str(template))
    for call in (by_openai, by_openai_streamed, by_responses, by_anthropic):
        session = await opened(gateway)
        assert blame(await failure_of(call, session)) == INFRASTRUCTURE
        [logged] = [r for r in caplog.records if r.exc_info and session.session_id in r.getMessage()]
        assert isinstance(logged.exc_info[1], ZeroDivisionError)
        [error] = (await captured(gateway, session)).errors
        assert (error["status"], error["http_status"]) == ("error", 500)
    assert engine.calls == []


async def test_a_fault_of_the_gateway_before_the_call_begins_is_the_infrastructures_and_logged(
    session: SessionHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hmac, "compare_digest", raises(RuntimeError("cannot compare")))  # every key is compared with it
    for size in (1, 100_000):  # the key of a long request is checked before its body is read
        caplog.clear()
        status, _ = await asyncio.wait_for(ask(session, "x" * size), 30)
        assert status == 500
        assert "RuntimeError: cannot compare" in caplog.text


async def test_a_fault_of_the_gateway_after_the_reply_leaves_no_call_running(
    engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    async with gpt(session) as llm:  # both calls use one connection
        with monkeypatch.context() as patched:
            patched.setattr(Conversation, "commit", raises(TypeError("cannot add the turn")))
            await llm.chat.completions.create(model="m", messages=USER)
        assert "TypeError: cannot add the turn" in caplog.text
        await llm.with_options(timeout=60).chat.completions.create(model="m", messages=USER)
    assert (await GatewayClient(gateway.url).stats_async())["in_flight"] == 0


@pytest.mark.parametrize(("method", "path"), [("render", "chat/completions"), ("count", "messages/count_tokens")])
async def test_a_panic_of_the_tokenizer_is_a_500_at_once(
    engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    class PanicError(BaseException):
        """What Rust code raises is no `Exception`."""

    session = await opened(await start_gateway(engine, model_dir=str(MODEL)))
    monkeypatch.setattr(Renderer, method, raises(PanicError("unwrap on None")))
    body = {"model": "m", "messages": USER}
    status, _ = await request("POST", f"{session.base_url}/{path}", body=body, key=session.api_key, timeout_s=60)
    assert status == 500


async def test_a_fault_of_the_gateway_while_it_writes_the_reply_is_a_500_and_the_turn_is_not_delivered(
    engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await start_gateway(engine, model_dir=str(MODEL))
    session = await opened(gateway)
    monkeypatch.setattr(Dialect, "encode_reply", raises(TypeError("cannot write")))
    assert blame(await failure_of(by_openai, session)) == INFRASTRUCTURE
    assert "TypeError: cannot write" in caplog.text
    assert [turn.delivered for turn in (await captured(gateway, session)).turns] == [False]


async def test_a_fault_of_the_gateway_while_it_reads_a_reply_is_no_fault_of_the_server(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplyReader, "read", raises(TypeError("cannot read")))
    assert await status_of(session) == 500
    assert len(engine.calls) == 1
    assert [worker.total_failures for worker in gateway.router.workers.values()] == [0]
    [error] = (await captured(gateway, session)).errors
    assert error["http_status"] == 500


async def test_a_request_that_is_nested_too_deeply_is_the_agents(engine: ScriptedEngine, start_gateway: Start) -> None:
    schema = '{"properties": {"x": ' * 1000 + "{}" + "}}" * 1000
    session = await opened(await start_gateway(engine, model_dir=str(MODEL)))
    said = '"model": "m", "messages": [{"role": "user", "content": "hello"}]'
    function = f'{{"type": "function", "function": {{"name": "deep", "parameters": {schema}}}}}'
    bodies = {
        "chat/completions": f'{{{said}, "tools": [{function}]}}',
        "messages/count_tokens": f'{{{said}, "tools": [{{"name": "deep", "input_schema": {schema}}}]}}',
    }
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as llm:
        for route, body in bodies.items():
            reply = await llm.post(f"{session.base_url}/{route}", content=body.encode())
            assert reply.status_code == 400, reply.text
