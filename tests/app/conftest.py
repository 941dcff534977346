"""Real agents in processes of their own, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serving import WITHIN_S, Asked, wait_for

from ..conftest import reserved_port
from ..store.conftest import answering_s3

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"

PRELUDE = """
import asyncio, os, sys, time
from agentcore_rl_toolkit.app import AgentCoreRLApp
app = AgentCoreRLApp()
"""
POSTLUDE = """
if __name__ == "__main__":
    app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
"""


def new_session() -> str:
    return "session-" + uuid.uuid4().hex


class Agent:
    """One agent process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, results: Path) -> None:
        self.process, self.port, self._log, self.results = process, port, log, results

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def store_url(self) -> str:
        return f"file://{self.results}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {
            "Content-Type": "application/json",
            **({SESSION_HEADER: session} if session else {}),
            **(headers or {}),
        }
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def ping(self) -> str:
        return str(self.request("GET", "/ping")[1]["status"])

    def invoke(
        self, payload: Any, session: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        return self.request("POST", "/invocations", payload, session=session, headers=headers)

    def rollout(
        self,
        payload: Mapping[str, Any] | None = None,
        *,
        session: str | None = None,
        input_id: str = "input",
        **config: Any,
    ) -> tuple[Path, dict[str, Any]]:
        """Start a rollout; the path where its record will appear, and the reply."""
        block = {"exp_id": "exp", "input_id": input_id, "s3_bucket": self.store_url, **config}
        status, reply = self.invoke({**(payload or {}), "_rollout": block}, session or new_session())
        assert status == 200, reply
        return self.results / reply["result_key"], reply

    def record(self, path: Path, timeout_s: float = 60.0) -> dict[str, Any]:
        wait_for(path.exists, within_s=timeout_s)
        record = json.loads(path.read_text())
        assert isinstance(record, dict)
        return record

    def run(self, payload: Mapping[str, Any] | None = None, **config: Any) -> dict[str, Any]:
        """A rollout from start to record."""
        return self.record(self.rollout(payload, **config)[0])

    def listens(self) -> bool:
        """Whether it takes connections; it ceases to as soon as it shuts down."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def terminate(self, timeout_s: float = 60.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


StartAgent = Callable[..., Agent]


@dataclass
class FaultyS3:
    """A small S3 endpoint that keeps what it is given, unless `fault` says otherwise.

    ``fault(method, key)`` returns an HTTP status to refuse with, None to serve, or -1 to store and then hang up unanswered.
    """

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)
    fault: Callable[[str, str], int | None] = lambda _method, _key: None

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
        }

    def answer(self, request: Asked, _number: int) -> tuple[int, bytes] | None:
        key = urllib.parse.unquote(request.path.partition("?")[0].split("/", 2)[-1])
        refusal = self.fault(request.method, key)
        status, content = refusal or 200, b""
        if refusal in (None, -1):
            if request.method == "PUT":
                if "if-none-match" in request.headers and key in self.objects:
                    status = 412
                else:
                    self.objects[key] = request.body
            elif request.method == "DELETE":
                self.objects.pop(key, None)
                status = 204
            elif key in self.objects:
                content = self.objects[key]
            else:
                status = 404
        self.log.append((request.method, key, status))
        return None if refusal == -1 else (status, content)

    def records(self) -> dict[str, dict[str, Any]]:
        return {k: json.loads(v) for k, v in list(self.objects.items()) if k.endswith(".json")}


@pytest.fixture
def faulty_s3(shared_s3: FaultyS3) -> Iterator[FaultyS3]:
    """The one of this file: empty and without faults when a test begins."""
    shared_s3.objects.clear()
    shared_s3.log.clear()
    yield shared_s3
    shared_s3.fault = lambda _method, _key: None


@pytest.fixture(scope="module")
def shared_s3() -> Iterator[FaultyS3]:
    s3 = FaultyS3()
    with answering_s3(s3.answer) as s3.url:
        yield s3


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[StartAgent]:
    """Start agents from source code; all of them are gone when the test ends."""
    with agents_in(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartAgent]:
    """The same for agents that the tests of one file share."""
    with agents_in(tmp_path_factory.mktemp("shared")) as start:
        yield start


@contextlib.contextmanager
def agents_in(tmp_path: Path, *, as_it_is: bool = False) -> Iterator[StartAgent]:
    """``as_it_is``: the source is a whole program, which is started by `agentcore_rl_toolkit.app.deployed`."""
    starter = ["-m", "agentcore_rl_toolkit.app.deployed"] if as_it_is else []
    agents: list[Agent] = []
    ports = contextlib.ExitStack()

    def start(
        source: str,
        *,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        cwd: Path | None = None,
        within_s: float = WITHIN_S,
    ) -> Agent:
        number = len(agents)
        file = tmp_path / f"agent_{number}.py"
        file.write_text(source if as_it_is else PRELUDE + textwrap.dedent(source) + POSTLUDE)
        port = ports.enter_context(reserved_port())
        log = tmp_path / f"agent_{number}.log"
        results = tmp_path / f"results_{number}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [python, *starter, str(file), str(port)],
                stdout=stream,
                stderr=stream,
                cwd=cwd or tmp_path,
                env={**os.environ, **(env or {})},
            )
        agent = Agent(process, port, log, results)
        agents.append(agent)

        def up() -> bool:
            assert process.poll() is None, agent.log
            try:
                return bool(agent.ping())
            except OSError:
                return False

        wait_for(up, within_s=within_s)
        return agent

    try:
        yield start
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.kill()
            agent.process.wait(10)
        ports.close()
