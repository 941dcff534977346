"""A router in front of several engines is told the session, so that it can keep a session's calls on one of them."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient
from scripted_engine import ScriptedEngine

from ..asking import MODEL, Start, gpt


@pytest.mark.parametrize(("kind", "stream"), [("sglang", True), ("sglang-experts", False), ("vllm", False)])
async def test_sglangs_router_is_told_the_session_of_every_call(
    engine: ScriptedEngine, start_gateway: Start, kind: str, stream: bool
) -> None:
    gateway = await start_gateway(engine, engine=kind, model_dir=str(MODEL))
    sessions = await GatewayClient(gateway.url).create_sessions_async([new_session_id() for _ in range(2)])
    for _ in range(2):
        for session in sessions:
            async with gpt(session) as llm:
                reply = await llm.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=stream
                )
                if stream:
                    assert [part async for part in reply]  # type: ignore[union-attr]
    entries = [call.headers.get("x-smg-routing-key") for call in engine.calls]
    names = [session.session_id for session in sessions]
    assert entries == ([*names, *names] if kind.startswith("sglang") else [None] * 4)
