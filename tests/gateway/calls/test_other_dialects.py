"""Anthropic and Responses clients over a chat engine: same answers, same turns."""

from __future__ import annotations

import dataclasses

import anthropic
import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing import encode_messages
from scripted_engine import Fault, ScriptedEngine

from ..asking import captured, claude, gpt


async def test_errors_are_worded_as_the_provider_words_them(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    ask = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    async with claude(session) as llm:
        engine.faults.append(Fault(status=503))
        with pytest.raises(anthropic.APIStatusError) as caught:
            await llm.messages.create(**ask)
        assert caught.value.response.json()["error"]["type"] == "overloaded_error"
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await llm.messages.create(**ask, extra_body={"temperature": "hot"})
    async with claude(dataclasses.replace(session, api_key="wrong")) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**ask)
    assert (await captured(client, session)).turns == []


async def test_tokens_are_counted_by_the_engine_and_nothing_is_recorded(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    messages = [{"role": "user", "content": "one two three"}]
    async with claude(session) as llm:
        counted = await llm.messages.count_tokens(model="m", system="be brief", messages=messages)  # type: ignore[arg-type]
        expected = encode_messages([{"role": "system", "content": "be brief"}, *messages])
        assert counted.input_tokens == len(expected)
        said = [*messages, {"role": "assistant", "content": "four"}]
        counted = await llm.messages.count_tokens(model="m", messages=said)  # type: ignore[arg-type]
        assert counted.input_tokens == len(encode_messages(said))
        engine.gives_tokens = False  # an endpoint without /tokenize
        with pytest.raises(anthropic.BadRequestError) as caught:
            await llm.messages.count_tokens(model="m", messages=messages)  # type: ignore[arg-type]
    assert "count" in str(caught.value)
    async with claude(dataclasses.replace(session, api_key="wrong")) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.count_tokens(model="m", messages=messages)  # type: ignore[arg-type]
    capture = await captured(client, session)
    assert (capture.turns, capture.errors) == ([], [])


async def test_models_are_listed_and_found_by_clients_of_both_providers(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle
) -> None:
    [held] = await client.create_sessions_async([new_session_id()], model_id="org/small")
    for handle, names in ((session, [engine.model]), (held, ["org/small"])):
        async with gpt(handle) as llm:
            assert [m.id async for m in llm.models.list()] == names
            assert (await llm.models.retrieve(names[-1])).id == names[-1]
            with pytest.raises(openai.NotFoundError) as missing:
                await llm.models.retrieve("another")
            assert missing.value.code == "model_not_found"
        async with claude(handle) as other:
            page = await other.models.list()
            assert [m.id async for m in page] == names
            assert (page.has_more, page.data[0].type, page.data[0].display_name) == (False, "model", names[0])
            assert (await other.models.retrieve(names[0])).id == names[0]
            with pytest.raises(anthropic.NotFoundError):
                await other.models.retrieve("another")
    engine.model = None  # type: ignore[assignment]  # a server that lists nonsense
    async with gpt(session) as llm:
        assert [m.id async for m in llm.models.list()] == []
