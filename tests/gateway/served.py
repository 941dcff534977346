"""`agentcore-rl gateway serve` as a process that is killed and started again, on one store and at one address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine


class Served:
    """``under`` is a command that runs the gateway, ``environment`` what is added to that of the test."""

    def __init__(
        self,
        folder: Path,
        engine: ScriptedEngine,
        *options: str,
        kind: str = "vllm",
        under: Sequence[str] = (),
        **environment: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.ready, self.errors, self.port, self.url = folder / "ready.json", folder / "errors.txt", 0, ""
        self.line = [*under, sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", kind]
        self.line += ["--upstream", engine.url, "--ready-file", str(self.ready), *options]
        if not under:  # which would be the parent
            self.line += ["--parent-pid", str(os.getpid())]
        self.environment = {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | Any = None

    async def start(self, *more: str) -> str:
        """Start it, where it was before. Returns its URL."""
        self.ready.unlink(missing_ok=True)
        line = [*self.line, "--port", str(self.port), *more]
        with self.errors.open("wb") as errors:
            self.process = await asyncio.to_thread(subprocess.Popen, line, stderr=errors, env=self.environment)
        async with asyncio.timeout(60):
            while not self.ready.exists():
                assert self.process.poll() is None, self.errors.read_text()
                await asyncio.sleep(0.02)
        self.url = json.loads(self.ready.read_text())["url"]
        self.port = int(self.url.rpartition(":")[2])
        return self.url

    def kill(self) -> None:
        """It has no chance to write anything."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
