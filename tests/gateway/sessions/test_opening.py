"""Opening sessions: all that a request names, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient
from scripted_engine import ScriptedEngine

from ..asking import Start
from ..stores import refused


async def test_a_request_of_which_one_session_cannot_be_opened_opens_none(start_gateway: Start) -> None:
    gateway = await start_gateway()
    client = GatewayClient(gateway.url)
    [old] = await client.create_sessions_async(["rollout-1"], max_turns=1)
    with pytest.raises(GatewayError, match="session id"):
        await client.create_sessions_async(["new-1", "rollout-1", "a//b"], max_turns=5)
    assert [(s.id, s.settings.max_turns) for s in gateway.sessions.by_id.values()] == [(old.session_id, 1)]
    assert len(await client.create_sessions_async(["rollout-1", "new-1", "new-1", "new-2"])) == 4


async def test_a_session_that_the_disk_refuses_is_an_error_until_there_is_room(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    with refused(gateway), pytest.raises(GatewayError, match="cannot store a session"):
        await client.create_sessions_async(["one"])
    await client.create_sessions_async(["one"])
    await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    assert set(await GatewayClient(gateway.url).fetch_async(["one"])) == {"one"}
