"""Closed sessions go after the time that was set for them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine


async def test_only_sessions_closed_longer_ago_go(
    engine: ScriptedEngine, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(engine, retention_s=3600.0)
    client = GatewayClient(gateway.url)
    ids = [new_session_id() for _ in range(3)]
    await client.create_sessions_async(ids)
    await client.close_sessions_async(ids[:2])
    old, *_ = (gateway.sessions.by_id[each.encode()] for each in ids)
    assert old.closed_s is not None
    old.closed_s -= 3601
    gateway.sessions.expire(time.monotonic() + 3600, 3600.0)
    assert set(gateway.sessions.by_id) == {each.encode() for each in ids[1:]}
