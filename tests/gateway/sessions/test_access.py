"""Which sessions a client of OpenAI may call."""

from __future__ import annotations

import dataclasses

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle

from ..asking import USER, gpt


async def test_a_session_nobody_opened_is_refused_with_the_clients_own_error(gateway: Gateway) -> None:
    stranger = SessionHandle(session_id="x", base_url=f"{gateway.url}/sessions/{new_session_id()}/v1", api_key="k")
    async with gpt(stranger) as llm:
        with pytest.raises(openai.NotFoundError, match="no session"):
            await llm.chat.completions.create(model="m", messages=USER)


async def test_another_sessions_key_is_refused(client: GatewayClient, session: SessionHandle) -> None:
    [other] = await client.create_sessions_async([new_session_id()])
    async with gpt(dataclasses.replace(session, api_key=other.api_key)) as llm:
        with pytest.raises(openai.AuthenticationError):
            await llm.chat.completions.create(model="m", messages=USER)


async def test_a_closed_session_takes_no_late_turn(client: GatewayClient, session: SessionHandle) -> None:
    async with gpt(session) as llm:
        await llm.chat.completions.create(model="m", messages=USER)
        assert len((await client.fetch_async([session.session_id]))[session.session_id].turns) == 1
        with pytest.raises(openai.PermissionDeniedError, match="closed"):
            await llm.chat.completions.create(model="m", messages=USER)
        assert await client.delete_async([session.session_id]) == 1
        with pytest.raises(openai.NotFoundError):
            await llm.chat.completions.create(model="m", messages=USER)
    assert await client.fetch_async([session.session_id]) == {}
