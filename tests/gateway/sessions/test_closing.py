"""A session that somebody was told to be closed stays closed, whatever happens to the gateway after that."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]


@pytest.mark.parametrize("how", ["close", "fetch", "delete", "rllm", "rllm batch"])
async def test_nobody_is_told_that_a_session_is_closed_before_that_is_stored(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path), fsync=True)
    client = GatewayClient(gateway.url)
    name = new_session_id()
    await client.create_sessions_async([name])
    syncing, go_on, real = threading.Event(), threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        syncing.set()
        assert go_on.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    work: Any = {
        "close": lambda: client.close_sessions_async([name]),
        "fetch": lambda: client.fetch_async([name]),
        "delete": lambda: client.delete_async([name]),
        "rllm": lambda: request("DELETE", f"{gateway.url}/sessions/{name}"),
        "rllm batch": lambda: request("POST", f"{gateway.url}/sessions/batch_delete", body={"session_ids": [name]}),
    }
    try:
        reply = asyncio.ensure_future(work[how]())
        assert await asyncio.to_thread(syncing.wait, 60)
        done, _ = await asyncio.wait({reply}, timeout=0.5)
        assert not done
    finally:
        go_on.set()
    await reply
