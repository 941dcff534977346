"""What may be over soon is answered with Retry-After, by every route."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

Start = Callable[..., Awaitable[Gateway]]
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
NO_ROOM = {"metadata": {"pad": "x" * 200_000}}  # more than a file may hold in `small`


async def agents_answers(gateway: Gateway) -> list[tuple[int, str | None]]:
    """Status and Retry-After of the routes beside the model calls."""
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as http:
        answers = [
            await http.get(session.base_url + "/models"),
            await http.get(session.base_url + "/models", headers={"anthropic-version": "2023-06-01"}),
            await http.post(session.base_url + "/messages/count_tokens", json=MESSAGES),
        ]
    assert [a.json().get("type") for a in answers] == [None, "error", "error"]
    return [(a.status_code, a.headers.get("retry-after")) for a in answers]


async def test_without_a_server_models_and_counts_are_for_later(start_gateway: Start) -> None:
    assert await agents_answers(await start_gateway()) == [(503, "1")] * 3


async def test_while_a_server_cannot_be_reached_they_are_for_later_and_what_is_not_there_is_not(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine)
    [session] = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as http:
        missing = await http.get(session.base_url + "/models/none")
    assert (missing.status_code, missing.headers.get("retry-after")) == (404, None)
    await engine.stop()
    assert await agents_answers(gateway) == [(502, "1")] * 3


@pytest.fixture
async def small(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[str]:
    """A gateway none of whose files may grow beyond 64 or 128 kB."""
    ready = tmp_path / "ready.json"
    line = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--no-admin-key", "--engine", "vllm"]
    line += ["--upstream", engine.url, "--store", str(tmp_path / "store"), "--ready-file", str(ready)]
    line += ["--parent-pid", str(os.getpid())]
    process = await asyncio.to_thread(subprocess.Popen, ["sh", "-c", 'ulimit -f 128 && exec "$@"', "sh", *line])
    try:
        async with asyncio.timeout(40):
            while not ready.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


async def test_sessions_that_the_disk_does_not_take_are_for_later(small: str) -> None:
    async with httpx.AsyncClient(base_url=small) as http:
        ours = await http.post("/admin/sessions", json={"session_ids": [new_session_id()], "settings": NO_ROOM})
        rllms = await http.post("/sessions", json={"session_id": new_session_id(), **NO_ROOM})
        bad = await http.post("/sessions", content=b"{")
    assert [(a.status_code, a.headers.get("retry-after")) for a in (ours, rllms)] == [(503, "1")] * 2
    for answer in (ours, rllms):
        assert answer.json()["error"]["message"].startswith("the gateway cannot store a session")
    assert (bad.status_code, bad.headers.get("retry-after")) == (400, None)
