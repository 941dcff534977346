"""Opening sessions: all that a request names, or none."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, Limits, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

from ..stores import refused

Start = Callable[..., Awaitable[Gateway]]


async def ask(session: SessionHandle) -> int:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return (await request("POST", session.base_url + "/chat/completions", body=body, key=session.api_key))[0]


async def test_a_request_of_which_one_session_cannot_be_opened_opens_none(start_gateway: Start) -> None:
    gateway = await start_gateway(limits=Limits(sessions=3))
    client = GatewayClient(gateway.url)
    [old] = await client.create_sessions_async(["rollout-1"], max_turns=1)
    for names, why in ((["new-1", "a//b"], "session id"), (["rollout-1", "new-1", "new-2", "new-3"], "may be 3")):
        with pytest.raises(GatewayError, match=why):
            await client.create_sessions_async(names, max_turns=5)
        assert [(s.id, s.settings.max_turns) for s in gateway.sessions.by_id.values()] == [(old.session_id, 1)]


async def test_the_settings_of_a_request_that_the_disk_refuses_are_those_of_before(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    old = ["rollout-1", "rollout-2"]
    sessions = await client.create_sessions_async(old, max_turns=1)
    assert [await ask(s) for s in sessions] == [200, 200]
    with refused(gateway), pytest.raises(GatewayError, match="cannot store a session"):
        await client.create_sessions_async([*old[:1], "new-1", *old[1:], "new-2"], max_turns=5)
    assert set(await client.fetch_async([*old, "new-1", "new-2"], close=False)) == set(old)
    async with asyncio.timeout(30):
        while gateway.store.failed is not None:  # noqa: ASYNC110  (its clock)
            await asyncio.sleep(0.02)
    assert [await ask(s) for s in sessions] == [403, 403]
    await gateway.stop()
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    assert set(await client.fetch_async([*old, "new-1", "new-2"], close=False)) == set(old)
    sessions = [dataclasses.replace(s, base_url=f"{gateway.url}/sessions/{s.session_id}/v1") for s in sessions]
    assert [await ask(s) for s in sessions] == [403, 403]


async def test_openings_of_one_session_that_a_slow_disk_refuses_leave_the_settings_of_before(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path), fsync=True)
    client = GatewayClient(gateway.url)
    [session] = await client.create_sessions_async(["rollout-1"], max_turns=1)
    assert await ask(session) == 200
    syncing, go_on = threading.Event(), threading.Event()

    def fsync(fd: int) -> None:
        syncing.set()
        assert go_on.wait(30)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        received = gateway.counters["admin_requests"]
        asked = [client.create_sessions_async(["rollout-1"], max_turns=turns) for turns in (4, 5, 6)]
        opening = [asyncio.ensure_future(each) for each in asked]
        assert await asyncio.to_thread(syncing.wait, 30)
        async with asyncio.timeout(30):
            while gateway.counters["admin_requests"] < received + 3:  # noqa: ASYNC110  (a socket at the other end)
                await asyncio.sleep(0.005)
        go_on.set()
        done = await asyncio.gather(*opening, return_exceptions=True)
    assert [isinstance(each, GatewayError) for each in done] == [True] * 3
    assert await ask(session) == 403
