"""A local runtime as an object, for programs and tests."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._servers import keys
from .._servers.child import Child
from ..errors import LocalRuntimeError
from .remote import RuntimeView

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


class LocalRuntime:
    """A runtime in its own process, for the time of a ``with`` block (or from `start` to `stop`).

    ::

        with LocalRuntime({"math": "rl_app.py"}, ["--quotas", "aws-2026"]) as runtime:
            client = boto3.client("bedrock-agentcore", endpoint_url=runtime.url, **runtime.credentials)
            client.invoke_agent_runtime(agentRuntimeArn=runtime.arns["math"], payload=b"{}")

    ``options`` are those of ``agentcore-rl runtime serve``. The process ends with the block, and also when this process is
    gone. After `start`: ``url``, ``credentials`` for boto3, ``arns`` by agent name, ``pid``, ``view`` (sessions, logs).

    Raises: LocalRuntimeError with the process's output when it does not start.
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
        self._child: Child | None = None

    def start(self) -> LocalRuntime:
        """Start and wait until every agent is loaded."""
        with tempfile.TemporaryDirectory(prefix="agentcore-rl-start-") as folder:
            words = ["runtime", "serve", *self._options]
            for name, path in self._agents.items():
                words += ["--agent", f"{name}={path}"]
            child = Child("local runtime", words, Path(folder) / "runtime.log", self._env or {}, LocalRuntimeError)
            self._child = child
            child.wait_ready(START_TIMEOUT_S)
        info = child.ready
        self.url, self.pid, self.arns = info["url"], info["pid"], info["agents"]
        access_key, secret = keys.credential_of_runtime(self.url) or ("local", "local")
        self.credentials = {"aws_access_key_id": access_key, "aws_secret_access_key": secret}
        self.view = RuntimeView(self.url)
        return self

    def stop(self) -> None:
        """Stop gracefully, or by force after a while. Safe to call twice."""
        if self._child is not None:
            self._child.process.terminate()
            self._child.end(STOP_TIMEOUT_S)
        self._child = None

    def __enter__(self) -> LocalRuntime:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
