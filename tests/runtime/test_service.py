"""The process of a runtime: what signals do to it at any moment."""

from __future__ import annotations

import subprocess
import sys

STOPPED_WHILE_IT_STARTS = """
import os, signal
import uvicorn
from agentcore_rl_toolkit.runtime import roots, service
from agentcore_rl_toolkit.runtime.config import IsolationConfig, RuntimeConfig

startup = uvicorn.Server.startup

async def stopped(self, sockets=None):
    os.kill(os.getpid(), signal.SIGINT)
    await startup(self, sockets)

uvicorn.Server.startup = stopped
service.run(RuntimeConfig(isolation=IsolationConfig(tier="process")), [])
print([p.name for p in roots.base_dir().iterdir() if p.name.startswith(str(os.getpid()))])
"""


def test_a_stop_while_the_server_starts_is_a_graceful_one() -> None:
    command = [sys.executable, "-c", STOPPED_WHILE_IT_STARTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
    assert "Traceback" not in done.stderr
