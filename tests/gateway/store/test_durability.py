"""Restarts and kills: what an agent saw answered is in the store, once."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import openai
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.http.client import stream
from scripted_engine import ScriptedEngine

from ..asking import Start, gpt, until
from ..served import Served

USER = [{"role": "user", "content": "hello there"}]


async def test_sessions_keys_and_turns_survive_a_restart(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    first = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(first.url)
    kept, deleted, closed = await client.create_sessions_async([new_session_id() for _ in range(3)], max_turns=2)
    for session in (kept, deleted, closed):
        async with gpt(session) as llm:
            await llm.chat.completions.create(model="m", messages=USER)
    await client.delete_async([deleted.session_id])
    await client.fetch_async([closed.session_id])
    await first.stop()
    second = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(second.url)
    moved = SessionHandle(
        session_id=kept.session_id, api_key=kept.api_key, base_url=f"{second.url}/sessions/{kept.session_id}/v1"
    )
    async with gpt(moved) as llm:
        await llm.chat.completions.create(model="m", messages=[*USER, {"role": "assistant", "content": "w5"}, *USER])
        with pytest.raises(openai.PermissionDeniedError):
            await llm.chat.completions.create(model="m", messages=USER)
    found = await client.fetch_async([kept.session_id, deleted.session_id, closed.session_id], close=False)
    assert set(found) == {kept.session_id, closed.session_id}
    assert [t.index for t in found[kept.session_id].turns] == [0, 1]
    assert found[closed.session_id].closed


def text_of(reply: bytes) -> str:
    """The assistant's text in a whole or streamed reply."""
    return "".join(json.loads(f'"{t}"') for t in re.findall(r'"content":"((?:[^"\\\\]|\\\\.)*)"', reply.decode()))


def id_of(reply: bytes) -> str:
    found = re.search(r'"id":"([^"]+)"', reply.decode())
    assert found is not None
    return found[1]


class Agents:
    """Agents that call until their gateway is gone, and what they saw answered: bodies by session."""

    def __init__(self, count: int) -> None:
        self.ids = [new_session_id() for _ in range(count)]
        self.seen: dict[str, list[bytes]] = {}

    async def work(self, session: SessionHandle, streamed: bool) -> None:
        body = {"model": "m", "messages": USER, "stream": streamed, "max_tokens": 40}
        url = session.base_url + "/chat/completions"
        while True:
            got = b""
            try:
                async for piece in stream("POST", url, body=body, key=session.api_key, timeout_s=10):
                    got += piece
            except GatewayError:
                if b'"finish_reason":"' not in got:  # not answered: it may be stored or not
                    return
            self.seen.setdefault(session.session_id, []).append(got)

    async def start(self, url: str) -> list[asyncio.Future[None]]:
        sessions = await GatewayClient(url).create_sessions_async(self.ids)
        return [asyncio.ensure_future(self.work(s, i % 2 == 0)) for i, s in enumerate(sessions)]

    async def see(self, more: int) -> None:
        """Until so many more replies have arrived, to all agents together."""
        wanted = more + sum(map(len, self.seen.values()))
        await until(lambda: sum(map(len, self.seen.values())) >= wanted)

    async def check(self, url: str, *, texts: bool) -> int:
        """Look for what was answered in what is stored. Returns how much that is."""
        found = await GatewayClient(url).fetch_async(self.ids)
        for session_id, replies in self.seen.items():
            stored = [r.reply_id for r in found[session_id].records if r.status == "ok"]
            assert len(stored) == len(set(stored)) == len(found[session_id].turns), "a turn is stored twice"
            missing = {id_of(reply) for reply in replies} - set(stored)
            assert not missing, f"{len(missing)} answered turns of {len(replies)} are lost"
            if texts:
                kept = {" ".join(f"w{i}" for i in t.completion_ids if i != 2) for t in found[session_id].turns}
                assert {text_of(reply) for reply in replies} <= kept
        return sum(map(len, self.seen.values()))


KILLS = 40 if os.environ.get("AGENTCORE_RL_NIGHTLY") else 2


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_turn_an_agent_saw_answered_survives_kill_9_exactly_once(tmp_path: Path) -> None:
    agents = Agents(8)
    async with ScriptedEngine(tokens=6) as engine:
        served = Served(tmp_path, engine, "--store", str(tmp_path / "store"))
        try:
            for _ in range(KILLS):
                running = await agents.start(await served.start())
                await agents.see(16)
                served.kill()
                await asyncio.gather(*running)
            assert await agents.check(await served.start(), texts=True) >= 16 * KILLS
        finally:
            served.kill()
