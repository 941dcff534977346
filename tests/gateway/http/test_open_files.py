"""More agents than the usual limit of open files allows for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine


async def test_without_a_descriptor_the_call_fails_and_not_the_server(
    engine: ScriptedEngine, start_gateway: Callable[..., Awaitable[Gateway]]
) -> None:
    gateway = await start_gateway(engine, limits=Limits(connect_s=0.3))
    (session,) = await GatewayClient(gateway.url).create_sessions_async([new_session_id()])
    url = urlsplit(session.base_url)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    call = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {session.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = os.dup(0)  # the kernel gives out the lowest
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        writer.write(call.encode())
        output = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert output.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in output
        length = int(output.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert b"ulimit -n" in await reader.readexactly(length)
        assert [(w.total_failures, w.inflight) for w in gateway.router.workers.values()] == [(0, 0)]
        writer.write(call.encode())
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        writer.close()
        with contextlib.suppress(OSError):  # a loop that ends before would leave the socket to the collector
            await writer.wait_closed()


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
        async with asyncio.timeout(90):  # of a loaded machine
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
        await asyncio.to_thread(process.wait, 60)
