"""What a gateway looks at now and then."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]


async def test_what_fails_now_and_then_ends_no_deadline_and_is_logged_once(
    engine: ScriptedEngine, start_gateway: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(engine, limits=Limits(call_s=0.2))
    broken: list[str] = []

    def fail(*_: Any) -> None:
        broken.append("looked")
        raise LookupError("of a kind that nobody foresaw")

    monkeypatch.setattr(gateway.sessions, "expire", fail)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            engine.faults.append(Fault(delay_s=20.0))
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            status, _ = await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key)
            assert status == 504
    assert len(broken) >= 2
    assert caplog.text.count("looking after the gateway failed (1 times)") == 1
    assert "LookupError: of a kind that nobody foresaw" in caplog.text
    await gateway.stop(grace_s=0.2)
