"""A session that somebody was told to be closed stays closed, whatever happens to the gateway after that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient
from scripted_engine import ScriptedEngine

from ..asking import Start
from ..stores import locked


@pytest.mark.parametrize("how", ["fetch", "delete"])
async def test_nobody_is_told_that_a_session_is_closed_before_that_is_stored(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    name = new_session_id()
    await client.create_sessions_async([name])
    work: Any = {
        "fetch": lambda: client.fetch_async([name]),
        "delete": lambda: client.delete_async([name]),
    }
    with locked(tmp_path, monkeypatch):
        reply = asyncio.ensure_future(work[how]())
        done, _ = await asyncio.wait({reply}, timeout=0.5)
        assert not done
    await reply
