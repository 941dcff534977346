"""`agentcore-rl policy tinker` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agentcore_rl_toolkit.gateway.http.client import request


async def start(folder: Path, *words: str) -> tuple[asyncio.subprocess.Process, str]:
    """Start one. It imports torch first, which takes a minute where other processes have the cores."""
    ready = folder / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "agentcore_rl_toolkit.cli", "policy", "tinker", "--ready-file", str(ready), *words]
    )
    give_up_s = time.monotonic() + 200
    while not ready.exists():
        assert process.returncode is None
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.05)
    reply = json.loads(ready.read_text())
    assert reply["pid"] == process.pid
    return process, str(reply["url"])


@pytest.mark.slow
@pytest.mark.timeout(800)
async def test_it_answers_and_ends_with_its_parent(tmp_path: Path) -> None:
    # A parent that lives until it is killed, not for a time in which the server may still be loading.
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    process, url = await start(tmp_path, "--base-model", "mine", "--parent-pid", str(parent.pid))
    status, reply = await request("GET", f"{url}/api/v1/get_server_capabilities", key="tml-x")
    assert (status, b"X-API-Key" in reply) == (401, True)  # the service's header is another than ours
    parent.kill()
    await parent.wait()
    assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(800)
async def test_a_signal_ends_it_with_success(tmp_path: Path) -> None:
    process, _ = await start(tmp_path, "--parent-pid", str(os.getpid()))
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 0
