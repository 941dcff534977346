"""More agents than the usual limit of open files allows for."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.http_client import request
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine


@pytest.mark.parametrize(
    ("limit", "agents"),
    [("ulimit -S -n 128", 150), ("ulimit -n 128", 90)],
    ids=["soft: it is raised", "hard: calls wait for a connection of another"],
)
async def test_every_agent_is_answered_and_the_server_not_taken_for_dead(
    engine: ScriptedEngine, tmp_path: Path, limit: str, agents: int
) -> None:
    ready = tmp_path / "ready.json"
    line = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "vllm"]
    line += ["--upstream", engine.url, "--store", str(tmp_path / "store"), "--ready-file", str(ready)]
    line += ["--parent-pid", str(os.getpid())]
    line = ["sh", "-c", f'{limit}; exec "$@"', "sh", *line]
    process = await asyncio.to_thread(subprocess.Popen, line, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(30):
            while not ready.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        client = GatewayClient(json.loads(ready.read_text())["url"])
        sessions = await client.create_sessions_async([new_session_id() for _ in range(agents)])
        engine.faults.extend([Fault(delay_s=0.2)] * agents)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        calls = [request("POST", s.base_url + "/chat/completions", body=body, key=s.api_key) for s in sessions]
        assert Counter(status for status, _ in await asyncio.gather(*calls)) == {200: agents}
        assert [(w["failures"], w["healthy"]) for w in await client.workers_async()] == [(0, True)]
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)
