"""The Ray actor of a node, which keeps a local runtime as its child process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import bundles

STOP_S = 12.0  # for a runtime to end its sessions


class NodeRuntime:
    """Runs inside the Ray actor. When the actor or its node ends, the runtime sees that its parent is gone and ends too."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentcore-rl-node-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, host: str, config: bytes, within_s: float) -> dict[str, Any]:
        """Start a runtime with this pickled configuration on this address of the node. Returns what its ready file holds.

        Raises: RuntimeError with the end of its output when it does not come up.
        """
        given, ready, output = (self._folder / name for name in ("config", "ready.json", "output"))
        with open(os.open(given, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(config)
        command = [
            sys.executable,
            "-m",
            "agentcore_rl_toolkit.runtime.service",
            str(given),
            host,
            str(ready),
            str(os.getpid()),
        ]
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with output.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        give_up_s = time.monotonic() + within_s
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.stop()
                raise RuntimeError(f"the runtime did not start on {host}: {output.read_text()[-2000:]}")
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(ready.read_text())
        return found

    def unpack(self, data: bytes, name: str) -> str:
        """Unpack an agent's folder where this node keeps such. Returns its path."""
        folder = self._folder / "agents" / name
        bundles.unpack(data, folder)
        return str(folder)

    def read(self, path: str) -> bytes | None:
        """A small file of this node; None when it is not there."""
        try:
            return Path(path).read_bytes()
        except OSError:
            return None

    def stop(self) -> None:
        """End the runtime with its sessions, and remove what was unpacked."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
