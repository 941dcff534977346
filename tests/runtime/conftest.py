"""A real runtime process per test module, and boto3 clients for it as a user would make them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from botocore.config import Config

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from serving import START_S, wait_for

from .container_images import engine_storage

__all__ = ["engine_storage"]  # a fixture; here, so that the files with containers share one engine
AGENTS = Path(__file__).parent / "deployable"


def agent_fields(artifact: Path | str) -> dict[str, Any]:
    """What the control plane is given with every agent: a file of this machine, or an image."""
    uri = artifact if isinstance(artifact, str) else f"local://{artifact}"
    return {
        "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": uri}},
        "roleArn": "arn:aws:iam::123456789012:role/agent",
        "networkConfiguration": {"networkMode": "PUBLIC"},
    }


def write_agent(path: Path, body: str) -> Path:
    """Write an agent without the SDK. ``body`` has its ``async def answer(payload, session)``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((AGENTS / "bare.py").read_text().replace("if __name__ ==", f"{body}\n\nif __name__ =="))
    return path


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False


def shown(chunks: list[dict[str, Any]], stream: str = "stdout") -> str:
    """The output in the events of a command."""
    return "".join(chunk.get("contentDelta", {}).get(stream, "") for chunk in chunks)


class Server:
    """A runtime in a process of its own."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        agent: Path = AGENTS / "probe.py",
        wait: bool = True,
        credential: str | None = None,
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        self.folder = folder
        self.ready_file = folder / "ready.json"
        self.output = folder / "output.txt"
        command = [python, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--agent", f"probe={agent}"]
        command += ["--callers", "any"] if credential is None else []
        if credential is not None:
            environment["AGENTCORE_RL_CREDENTIALS"] = credential
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--ready-file", str(self.ready_file), "--parent-pid", str(os.getpid()), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SECRET_OF_THE_HOST": "s3cr3t", **environment},
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(lambda: self.ready_file.exists() or self.process.poll() is not None, within_s=START_S)
        assert self.process.poll() is None, self.output.read_text()
        self.info = json.loads(self.ready_file.read_text())
        self.url = self.info["url"]
        self.arn = self.info["agents"]["probe"]
        self.view = RuntimeView(self.url)

    def client(self, service: str = "bedrock-agentcore", **config: Any) -> Any:
        """An unmodified boto3 client that finds this runtime as a user's would: by the environment."""
        name = f"AWS_ENDPOINT_URL_{service.upper().replace('-', '_')}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, self.url)
            return boto3.client(
                service,
                region_name="us-west-2",
                aws_access_key_id="AKLOCAL",
                aws_secret_access_key="secret",
                config=Config(**{"retries": {"total_max_attempts": 1}, "read_timeout": START_S, **config}),
            )

    @functools.cached_property
    def default_client(self) -> Any:
        return self.client(max_pool_connections=20)

    @functools.cached_property
    def control(self) -> Any:
        return self.client("bedrock-agentcore-control")

    def create(self, artifact: Path | str = AGENTS / "bare.py", **fields: Any) -> dict[str, Any]:
        """Create an agent through the control plane, of a new name if none is given."""
        name = f"a{uuid.uuid4().hex[:12]}"
        made: dict[str, Any] = self.control.create_agent_runtime(
            **{"agentRuntimeName": name, **agent_fields(artifact), **fields}
        )
        return made

    def settled(self, made: dict[str, Any], **version: str) -> dict[str, Any]:
        """What became of a created or updated agent."""

        def look() -> Any:
            state = self.control.get_agent_runtime(agentRuntimeId=made["agentRuntimeId"], **version)
            return None if state["status"].endswith("ING") else state

        found: dict[str, Any] = wait_for(look)
        return found

    def delete(self, made: dict[str, Any]) -> None:
        self.control.delete_agent_runtime(agentRuntimeId=made["agentRuntimeId"])

    def invoke(self, payload: Any, session_id: str | None = None, *, client: Any = None, arn: str | None = None) -> Any:
        """Invoke and parse the JSON reply."""
        reply = (client or self.default_client).invoke_agent_runtime(
            agentRuntimeArn=arn or self.arn,
            runtimeSessionId=session_id or new_session_id(),
            payload=json.dumps(payload).encode(),
        )
        return json.loads(reply["response"].read())

    def command(self, session_id: str, text: str, **body: Any) -> list[dict[str, Any]]:
        """Run a command in a session, and return the events of its reply."""
        reply = self.default_client.invoke_agent_runtime_command(
            agentRuntimeArn=self.arn, runtimeSessionId=session_id, body={"command": text, **body}
        )
        return [event["chunk"] for event in reply["stream"]]

    def session(self, session_id: str) -> dict[str, Any] | None:
        """A live session as the runtime describes it."""
        return next((s for s in self.view.sessions() if s["session_id"] == session_id), None)

    def ended(self, session_id: str) -> dict[str, Any] | None:
        """A session that is over, once its process is gone."""
        found = [s for s in self.view.get("/_local/sessions")["ended"] if s["session_id"] == session_id]
        return next((s for s in found if s["exit_status"] is not None or s["pid"] is None), None)

    def logged(self, session_id: str, text: str) -> bool:
        """Whether a live session has printed it."""
        session = self.session(session_id)
        return session is not None and Path(session["log"]).exists() and text in Path(session["log"]).read_text()

    def processes(self) -> list[int]:
        """All processes below this one: templates, sessions and what they started, sandboxes left out."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [p.pid for p in found if alive(p.pid) and p.name() != "bwrap"]

    def template_pid(self) -> int:
        return int(self.view.get("/_local/status")["templates"][0]["pid"])

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(120)  # containers end slowly on a busy machine


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start runtimes with options of the test's choice; all are stopped afterwards."""
    servers: list[Server] = []

    def start(*options: str, **more: Any) -> Server:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        servers.append(Server(folder, *options, **more))
        return servers[-1]

    yield start
    for server in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.stop()
        server.process.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One runtime with default options for all tests."""
    server = Server(tmp_path_factory.mktemp("runtime"))
    yield server
    assert server.stop() == 0, server.output.read_text()


@pytest.fixture
def client(server: Server) -> Any:
    return server.default_client


@pytest.fixture
def session_id() -> str:
    return new_session_id()
