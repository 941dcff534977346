"""Restarts and kills: what an agent saw answered is in the store, once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http_client import request, stream
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

USER = [{"role": "user", "content": "hello there"}]
Start = Callable[..., Awaitable[Gateway]]


def agent(session: SessionHandle) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


async def test_sessions_keys_and_turns_survive_a_restart(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    first = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(first.url)
    kept, deleted, closed = await client.create_sessions_async([new_session_id() for _ in range(3)], max_turns=2)
    for session in (kept, deleted, closed):
        async with agent(session) as llm:
            await llm.chat.completions.create(model="m", messages=USER)
    await client.delete_async([deleted.session_id])
    await client.close_sessions_async([closed.session_id])
    await first.stop()
    second = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(second.url)
    moved = SessionHandle(
        session_id=kept.session_id, api_key=kept.api_key, base_url=f"{second.url}/sessions/{kept.session_id}/v1"
    )
    async with agent(moved) as llm:
        await llm.chat.completions.create(model="m", messages=[*USER, {"role": "assistant", "content": "w5"}, *USER])
        with pytest.raises(openai.RateLimitError):
            await llm.chat.completions.create(model="m", messages=USER)
    found = await client.fetch_async([kept.session_id, deleted.session_id, closed.session_id], close=False)
    assert set(found) == {kept.session_id, closed.session_id}
    assert [t.index for t in found[kept.session_id].turns] == [0, 1]
    assert found[closed.session_id].closed


async def test_retention_drops_the_oldest_sessions_and_bounds_the_store(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path), retention_bytes=30_000)
    gateway.journal.segment_bytes = 8_000
    client = GatewayClient(gateway.url)
    sessions = await client.create_sessions_async([new_session_id() for _ in range(30)])
    for session in sessions:
        for _ in range(3):
            url, body = session.base_url + "/chat/completions", {"messages": USER}
            status, _ = await request("POST", url, body=body, key=session.api_key)
            assert status == 200
    await asyncio.sleep(0.6)
    assert gateway.journal.total_bytes <= 40_000
    found = await client.fetch_async([s.session_id for s in sessions])
    assert sessions[0].session_id not in found
    assert len(found[sessions[-1].session_id].turns) == 3


class Served:
    """`agentcore-rl gateway serve` as a process of its own."""

    def __init__(self, engine_url: str, store: Path, ready: Path) -> None:
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "vllm"]
        command += ["--upstream", engine_url, "--store", str(store), "--ready-file", str(ready)]
        command += ["--parent-pid", str(os.getpid())]
        self.ready = ready
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    async def url(self) -> str:
        async with asyncio.timeout(30):
            while not self.ready.exists():
                assert self.process.poll() is None
                await asyncio.sleep(0.02)
        return str(json.loads(self.ready.read_text())["url"])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def text_of(reply: bytes) -> str:
    """The assistant's text in a whole or streamed reply."""
    return "".join(json.loads(f'"{t}"') for t in re.findall(r'"content":"((?:[^"\\\\]|\\\\.)*)"', reply.decode()))


KILLS = int(os.environ.get("AGENTCORE_RL_TEST_KILLS", "8"))


@pytest.mark.slow
@pytest.mark.serial
async def test_every_turn_an_agent_saw_answered_survives_kill_9_exactly_once(tmp_path: Path) -> None:
    store, ready = tmp_path / "store", tmp_path / "ready.json"
    seen: dict[str, list[str]] = {}
    ids = [new_session_id() for _ in range(8)]

    async def work(session: SessionHandle, streamed: bool) -> None:
        body = {"model": "m", "messages": USER, "stream": streamed}
        url = session.base_url + "/chat/completions"
        while True:
            got = b""
            try:
                async for piece in stream("POST", url, body=body, key=session.api_key, timeout_s=10):
                    got += piece
            except GatewayError:
                if b'"finish_reason":"' not in got:
                    return  # not answered: it may be stored or not
            seen.setdefault(session.session_id, []).append(text_of(got))

    async with ScriptedEngine(tokens=6) as engine:
        served: Served | None = None
        try:
            for _ in range(KILLS):
                served = Served(engine.url, store, ready)
                client = GatewayClient(await served.url())
                sessions = await client.create_sessions_async(ids)
                agents = [asyncio.ensure_future(work(s, i % 2 == 0)) for i, s in enumerate(sessions)]
                await asyncio.sleep(0.25)
                served.kill()
                await asyncio.gather(*agents)
            served = Served(engine.url, store, ready)
            found = await GatewayClient(await served.url()).fetch_async(ids)
        finally:
            if served is not None:
                served.kill()
    assert sum(map(len, seen.values())) > 100
    for session_id, texts in seen.items():
        stored = [" ".join(f"w{i}" for i in t.completion_ids if i != 2) for t in found[session_id].turns]
        assert len(stored) == len(set(stored)), "a turn is stored twice"
        missing = [t for t in texts if t not in set(stored)]
        assert missing == [], f"{len(missing)} answered turns of {len(texts)} are lost"
