"""A local runtime as an object, for programs and tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._servers import keys
from ..errors import LocalRuntimeError
from .remote import RuntimeView

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


class LocalRuntime:
    """A runtime in a process of its own, for the time of a ``with`` block (or from `start` to `stop`).

    ::

        with LocalRuntime({"math": "rl_app.py"}, ["--quotas", "aws-2026"]) as runtime:
            client = boto3.client("bedrock-agentcore", endpoint_url=runtime.url, **runtime.credentials)
            client.invoke_agent_runtime(agentRuntimeArn=runtime.arns["math"], payload=b"{}")

    ``options`` are those of ``agentcore-rl runtime serve``. The process ends with the block, and also when this process is
    gone. After `start`: ``url``, ``credentials`` for boto3, ``arns`` by agent name, ``pid``, ``view`` (sessions, logs).

    Raises: LocalRuntimeError with the process's own words when it does not start.
    """

    url: str
    credentials: Mapping[str, str]
    arns: Mapping[str, str]
    pid: int
    view: RuntimeView

    def __init__(
        self, agents: Mapping[str, str | Path], options: Sequence[str] = (), *, env: Mapping[str, str] | None = None
    ) -> None:
        self._agents = dict(agents)
        self._options = list(options)
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> LocalRuntime:
        """Start and wait until every agent is loaded."""
        with tempfile.TemporaryDirectory(prefix="agentcore-rl-start-") as folder:
            ready, output = Path(folder) / "ready.json", Path(folder) / "output"
            command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve"]
            for name, path in self._agents.items():
                command += ["--agent", f"{name}={path}"]
            command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid()), *self._options]
            with output.open("wb") as out:
                self._process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self._env
                )
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise LocalRuntimeError(f"the local runtime did not start:\n{output.read_text(errors='replace')}")
                time.sleep(0.01)
            info: dict[str, Any] = json.loads(ready.read_text())
        self.url, self.pid, self.arns = info["url"], info["pid"], info["agents"]
        access_key, secret = keys.credential_of_runtime(self.url) or ("local", "local")
        self.credentials = {"aws_access_key_id": access_key, "aws_secret_access_key": secret}
        self.view = RuntimeView(self.url)
        return self

    def stop(self) -> None:
        """Stop gracefully, or by force after a while. Safe to call twice."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> LocalRuntime:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
