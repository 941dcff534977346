"""A session that somebody was told to be closed stays closed, whatever happens to the gateway after that."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle, record
from agentcore_rl_toolkit.gateway.capture.build import Texts
from agentcore_rl_toolkit.gateway.capture.record import Captured
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, captured, status_of
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


async def test_a_call_that_ends_after_its_session_was_closed_is_no_turn(
    engine: ScriptedEngine, gateway: Gateway, session: SessionHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread packs its long prompt while the session is closed. The agent gets the reply, and nothing counts a turn."""
    packing, closed = threading.Event(), threading.Event()

    def pack(texts: Texts, captured: Captured) -> None:
        packing.set()
        assert closed.wait(30)

    monkeypatch.setattr(record, "pack_long_prompt", pack)
    engine.faults.append(Fault(edit=lambda reply: reply | {"prompt_token_ids": [1] * 600_000}))
    call = asyncio.create_task(status_of(session, "hello"))
    assert await asyncio.to_thread(packing.wait, 30)
    held = gateway.sessions.by_id[session.session_id.encode()]
    gateway.sessions.close(held)
    closed.set()
    assert await call == 200
    capture = await captured(gateway, session)
    assert (held.turns, gateway.sessions.turns, len(capture.turns)) == (0, 0, 0)
