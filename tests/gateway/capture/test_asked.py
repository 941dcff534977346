"""What the gateway knows of a call's role reaches the trajectory: tools, tag, sampling, images, blank answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import Fault, ScriptedEngine

from ..asking import until

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LONG = "w20 " * 3000


def client_of(session: SessionHandle, path: str = "", **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url + path, api_key=session.api_key, max_retries=0, **more)


async def ask(llm: openai.AsyncOpenAI, *messages: Any, **more: Any) -> None:
    said = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]
    await llm.chat.completions.create(model="m", messages=said, **more)


async def test_tools_tag_and_sampling_are_kept_with_each_turn(engine: ScriptedEngine, client: GatewayClient) -> None:
    params = {"temperature": 0.7}
    (session,) = await client.create_sessions_async([new_session_id()], sampling_params=params, train="task")
    system = {"role": "system", "content": "be brief"}
    async with client_of(session) as llm, client_of(session, "/tag/judge") as judge:
        await ask(llm, system, "w1", tools=[ADD], temperature=1.0, top_p=0.8, extra_body={"top_k": 20})
        await ask(llm, system, "w1", LONG, tools=[ADD], temperature=1.0, top_p=0.8, extra_body={"top_k": 20})
        await ask(judge, "w2 w3", frequency_penalty=0.5, logit_bias={"5": 2})
        await ask(llm, "w2 w3", extra_headers={"X-AgentCore-RL-Tag": "critic"})
        for bad in ("/tag/task", "/tag/a%20b"):
            with pytest.raises(openai.BadRequestError):
                async with client_of(session, bad) as other:
                    await ask(other, "w1")
    claude = anthropic.AsyncAnthropic(base_url=session.base_url + "/tag/judge", api_key=session.api_key, max_retries=0)
    async with claude:
        await claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "w4"}])
    assert not any("tag" in str(call.body) for call in engine.calls)
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    first, second, *others = capture.turns
    assert first.tools == second.tools == ("add",)
    assert first.sampling == second.sampling == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert first.system == second.system != others[0].system
    assert [t.tools for t in others] == [(), (), ()]
    assert others[0].sampling == {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": {"5": 2.0}}
    assert [t.tag for t in capture.turns] == [None, None, "judge", "critic", "judge"]
    assert capture.train == "task"
    report = build_trajectory(session.session_id, capture.turns, train=capture.train, temperature=0.7).report
    assert report.side_calls == {"tagged": sum(len(t.completion_ids) for t in others)}
    assert report.other_sampling == {"top_p 0.8, top_k 20": report.trained_tokens}
    with pytest.raises(GatewayError, match="tag"):
        await client.create_sessions_async([new_session_id()], train="two words")


async def test_of_two_calls_at_once_both_keep_their_fields_whichever_ends_first(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    slow = Fault(gate=asyncio.Event())
    engine.faults.append(slow)
    asked: dict[str, Any] = {"tools": [ADD], "temperature": 0.5}
    async with client_of(session, "/tag/judge") as llm:
        first = asyncio.ensure_future(ask(llm, {"role": "system", "content": "be brief"}, "w1", **asked))
        await until(lambda: engine.calls)
        await ask(llm, {"role": "system", "content": "be brief"}, "w2", **asked)
        slow.gate.set()
        await first
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert [t.prompt_ids for t in turns] == [c.prompt_ids for c in engine.calls]
    assert [(t.tools, t.tag, t.sampling) for t in turns] == [(("add",), "judge", {"temperature": 0.5})] * 2
    assert turns[0].system == turns[1].system is not None
    report = build_trajectory("s", turns, train="task").report
    assert report.side_calls == {"tagged": sum(len(t.completion_ids) for t in turns)}


async def test_turns_with_images_are_not_trained(client: GatewayClient, session: SessionHandle) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = {"role": "user", "content": [{"type": "text", "text": "w1"}, picture]}
    quoted = {"role": "user", "content": 'w2 {"type": "image_url"}'}
    async with client_of(session) as llm:
        await ask(llm, quoted)
        await ask(llm, seen)
        await ask(llm, {"role": "user", "content": LONG}, seen)  # one of the long requests
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert [t.why_untrainable() for t in capture.turns] == [None, "images", "images"]
    assert build_trajectory("s", capture.turns).report.untrainable_reasons == {"images": 2}


async def test_a_blank_answer_behind_reasoning_is_known(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    engine.replies += [{"content": "", "reasoning_content": "w5 w6"}, {"content": "w7", "reasoning_content": "w5"}]
    async with client_of(session) as llm:
        await ask(llm, "w1")
        await ask(llm, "w1")
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert [t.answered for t in capture.turns] == [False, True]
    assert build_trajectory("s", capture.turns).report.unanswered_turns == 1


async def test_a_store_gives_the_same_back(
    engine: ScriptedEngine, start_gateway: Callable[..., Awaitable[Gateway]], tmp_path: Any
) -> None:
    gateway = await start_gateway(engine, store_dir=tmp_path)
    client = GatewayClient(gateway.url)
    (session,) = await client.create_sessions_async([new_session_id()], train="main")
    async with client_of(session, "/tag/judge") as llm:
        await ask(llm, "w1", tools=[ADD])
    await gateway.stop()
    again = GatewayClient((await start_gateway(engine, store_dir=tmp_path)).url)
    capture = (await again.fetch_async([session.session_id]))[session.session_id]
    assert (capture.train, capture.turns[0].tag, capture.turns[0].tools) == ("main", "judge", ("add",))
