"""What `--retention-hours` deletes: what was closed long ago."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.store.schema import FILE
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]
YEAR_S = 365 * 86400.0


async def ask(session: SessionHandle) -> int:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return (await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key))[0]


async def one_call(gateway: Gateway, **settings: object) -> str:
    """A closed session with a call; returns its id."""
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async([new_session_id()], **settings)  # type: ignore[arg-type]
    assert await ask(session) == 200
    await client.close_sessions_async([session.session_id])
    return session.session_id


def closed_earlier(store: Path, by_s: dict[str, float]) -> None:
    """Let sessions of a store be as if they had been closed so long before."""
    database = sqlite3.connect(store / FILE)
    for name, seconds in by_s.items():
        database.execute("UPDATE sessions SET closed_s = closed_s - ? WHERE session_id = ?", (seconds, name))
    database.commit()
    database.close()


async def tended(gateway: Gateway, times: int = 2) -> None:
    """Return when the gateway has looked after its store so many times."""
    for _ in range(times):
        before = gateway.lag.now_s
        async with asyncio.timeout(30):
            while gateway.lag.now_s == before:  # noqa: ASYNC110  (the gateway's clock)
                await asyncio.sleep(0.01)


async def test_closed_sessions_go_when_they_are_old_and_open_ones_stay(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    stays, quiet = await client.create_sessions_async([new_session_id() for _ in range(2)])
    assert await ask(stays) == 200
    old, young = await one_call(gateway), await one_call(gateway)
    names = [stays.session_id, quiet.session_id, old, young]
    await gateway.stop()
    closed_earlier(tmp_path, {old: 3900.0, young: 2000.0})
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
            await tended(gateway)
        found = await GatewayClient(gateway.url).fetch_async(names, close=False)
        assert set(found) == {stays.session_id, quiet.session_id, young}
        assert caplog.text.count("deleted 1 sessions that were closed more than 1 h ago (--retention-hours)") == 1
        await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=1.0)
    at = dataclasses.replace(stays, base_url=f"{gateway.url}/{stays.base_url.split('/', 3)[3]}")
    async with asyncio.timeout(30):
        while await GatewayClient(gateway.url).fetch_async([young], close=False):  # noqa: ASYNC110  (its clock)
            await asyncio.sleep(0.05)
    assert await ask(at) == 200  # it is as it was
    found = await GatewayClient(gateway.url).fetch_async(names)
    assert {name: len(capture.turns) for name, capture in found.items()} == {stays.session_id: 2, quiet.session_id: 0}


@pytest.mark.parametrize("years", [1, -1])
async def test_a_step_of_the_wall_clock_makes_nothing_older(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_s=3600.0)
    real = time.time
    await one_call(gateway)
    monkeypatch.setattr(time, "time", lambda: real() + years * YEAR_S)
    await one_call(gateway)
    await tended(gateway)
    assert gateway.counters["sessions_expired"] == 0
