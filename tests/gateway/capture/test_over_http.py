"""Real OpenAI clients through a real gateway to a scripted engine: what the agent gets, and what is recorded."""

from __future__ import annotations

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.trajectory import build_trajectory
from scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "hello there"}]


def agent(session: SessionHandle, **settings: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_holds_exactly_the_tokens_the_engine_sampled(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    async with agent(session) as llm:
        if stream:
            text = ""
            async for chunk in await llm.chat.completions.create(model="m", messages=USER, stream=True):
                text += chunk.choices[0].delta.content or ""
        else:
            text = (await llm.chat.completions.create(model="m", messages=USER)).choices[0].message.content
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert capture.errors == []
    [turn] = capture.turns
    seen = engine.calls[0]
    assert turn.prompt_ids == seen.prompt_ids
    assert turn.completion_ids == seen.completion_ids[0]
    assert turn.logprobs == [-(i % 97) / 64 - 0.015625 for i in turn.completion_ids]
    assert turn.finish_reason == "stop"
    assert turn.parse_status == "none"
    assert turn.started_s <= turn.finished_s
    assert capture.dialogue == [*USER, {"role": "assistant", "content": text}] or capture.dialogue[1]["content"] == text
    assert capture.errors == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dialogue_of_many_turns_becomes_one_training_sequence(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, stream: bool
) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}, *USER]
    async with agent(session) as llm:
        for k in range(6):
            if stream:
                text = ""
                async for chunk in await llm.chat.completions.create(model="m", messages=messages, stream=True):
                    text += chunk.choices[0].delta.content or ""
            else:
                text = (await llm.chat.completions.create(model="m", messages=messages)).choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {k}"}]
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert [t.prompt_ids for t in capture.turns] == [r.prompt_ids for r in engine.calls]
    assert len(capture.dialogue) == len(messages) - 1
    stored = [len(r.prompt_ids) for r in capture.records]
    assert stored[0] > 0
    assert max(stored[1:]) <= 8 * 4, "a later prompt stores only what is new in it"
    trajectory = build_trajectory(session.session_id, capture.turns)
    assert len(trajectory.sequences) == 1
    assert trajectory.report.trained_token_share == 1.0
    assert sum(trajectory.sequences[0].loss_mask) == sum(len(r.completion_ids[0]) for r in engine.calls)


async def test_a_long_history_reaches_engine_and_record_as_the_agent_wrote_it(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "éß \\" + 'x "messages":[' * 3000}]
    async with agent(session) as llm:
        for k in range(4):
            messages.append({"role": "user", "content": f"go on {k}"})
            asked = [dict(m) for m in messages]
            reply = await llm.chat.completions.create(model="m", messages=messages, temperature=0.5)
            assert engine.requests[-1].body["messages"] == asked
            assert engine.requests[-1].body["temperature"] == 0.5
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    capture = (await client.fetch_async([session.session_id]))[session.session_id]
    assert len(capture.turns) == 4
    assert capture.dialogue[:-1] == messages[:-1]
    assert max(len(r.messages) for r in capture.records[1:]) < 500, "a later call stores only what is new in it"


async def test_the_published_weight_version_is_on_every_turn(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    async with agent(session) as llm:
        await client.set_weight_version_async(3)
        await llm.chat.completions.create(model="m", messages=USER)
        engine.weight_version = 4
        await llm.chat.completions.create(model="m", messages=USER)
    turns = (await client.fetch_async([session.session_id]))[session.session_id].turns
    assert [(t.weight_version_first, t.weight_version_last) for t in turns] == [(3, 3), (3, 4)]


async def test_a_session_nobody_opened_is_refused_with_the_clients_own_error(gateway: Gateway) -> None:
    stranger = SessionHandle(session_id="x", base_url=f"{gateway.url}/sessions/{new_session_id()}/v1", api_key="k")
    async with agent(stranger) as llm:
        with pytest.raises(openai.NotFoundError, match="no session"):
            await llm.chat.completions.create(model="m", messages=USER)


async def test_another_sessions_key_is_refused(client: GatewayClient, session: SessionHandle) -> None:
    [other] = await client.create_sessions_async([new_session_id()])
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=other.api_key, max_retries=0) as llm:
        with pytest.raises(openai.AuthenticationError):
            await llm.chat.completions.create(model="m", messages=USER)


async def test_a_closed_session_takes_no_late_turn(client: GatewayClient, session: SessionHandle) -> None:
    async with agent(session) as llm:
        await llm.chat.completions.create(model="m", messages=USER)
        assert len((await client.fetch_async([session.session_id]))[session.session_id].turns) == 1
        with pytest.raises(openai.PermissionDeniedError, match="closed"):
            await llm.chat.completions.create(model="m", messages=USER)
        assert await client.delete_async([session.session_id]) == 1
        with pytest.raises(openai.NotFoundError):
            await llm.chat.completions.create(model="m", messages=USER)
    assert await client.fetch_async([session.session_id]) == {}
