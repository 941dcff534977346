"""The process of a runtime: what signals do to it at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STOPPED_WHILE_IT_STARTS = """
import os, pathlib, signal, sys
import uvicorn
from agentcore_rl_toolkit.runtime import roots, service
from agentcore_rl_toolkit.runtime.config import IsolationConfig, RuntimeConfig

startup = uvicorn.Server.startup

async def stopped(self, sockets=None):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    await startup(self, sockets)

uvicorn.Server.startup = stopped
service.run(RuntimeConfig(isolation=IsolationConfig(tier="process")), [])
print([p.name for p in roots.base_dir().iterdir() if p.name.startswith(str(os.getpid()))])
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stop_while_the_server_starts_is_a_graceful_one(name: str) -> None:
    command = [sys.executable, "-c", STOPPED_WHILE_IT_STARTS, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
    assert "Traceback" not in done.stderr


def test_a_ready_file_that_cannot_be_written_ends_the_runtime_with_its_name(tmp_path: Path) -> None:
    """Whoever started it would wait for that file."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--isolation", "process"]
    command += ["--ready-file", str(tmp_path / "file" / "ready.json"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "ready.json cannot be written" in done.stderr
