"""Real agents in processes of their own, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..conftest import reserved_port

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"

PRELUDE = """
import asyncio, os, sys, time
from agentcore_rl_toolkit.app import AgentCoreRLApp
app = AgentCoreRLApp()
"""
POSTLUDE = """
if __name__ == "__main__":
    app.run(port=int(sys.argv[1]))
"""


def new_session() -> str:
    return "session-" + uuid.uuid4().hex


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`; fails the test when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"did not come true within {timeout_s} s")


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
        self, method: str, path: str, body: Any = None, *, session: str | None = None, timeout_s: float = 60.0
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"} | ({SESSION_HEADER: session} if session else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def ping(self) -> str:
        return str(self.request("GET", "/ping")[1]["status"])

    def invoke(self, payload: Any, session: str | None = None) -> tuple[int, Any]:
        return self.request("POST", "/invocations", payload, session=session)

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
        wait_for(path.exists, timeout_s)
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
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            key = urllib.parse.unquote(self.path.partition("?")[0].split("/", 2)[-1])
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            refusal = s3.fault(self.command, key)
            status, content = refusal or 200, b""
            with lock:
                if refusal in (None, -1):
                    if self.command == "PUT":
                        if "if-none-match" in self.headers and key in s3.objects:
                            status = 412
                        else:
                            s3.objects[key] = body
                    elif self.command == "DELETE":
                        s3.objects.pop(key, None)
                        status = 204
                    elif key in s3.objects:
                        content = s3.objects[key]
                    else:
                        status = 404
                s3.log.append((self.command, key, status))
            if refusal == -1:
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", '"0"')
            self.send_header("Last-Modified", "Fri, 20 Nov 2026 10:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_DELETE = serve

        def log_message(self, *args: object) -> None:
            """Nothing: `FaultyS3.log` has it."""

    with serving(Handler) as url:
        s3.url = url
        yield s3


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a free port of the loopback until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


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
def agents_in(tmp_path: Path) -> Iterator[StartAgent]:
    agents: list[Agent] = []
    ports = contextlib.ExitStack()

    def start(
        source: str, *, env: Mapping[str, str] | None = None, python: str = sys.executable, cwd: Path | None = None
    ) -> Agent:
        number = len(agents)
        file = tmp_path / f"agent_{number}.py"
        file.write_text(PRELUDE + textwrap.dedent(source) + POSTLUDE)
        port = ports.enter_context(reserved_port())
        log = tmp_path / f"agent_{number}.log"
        results = tmp_path / f"results_{number}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [python, str(file), str(port)],
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

        wait_for(up, 60)
        return agent

    try:
        yield start
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.kill()
            agent.process.wait(10)
        ports.close()


ROOT = Path(__file__).parents[2]


def our_source() -> dict[str, str]:
    """Environment variables that make another environment's Python import this package from its sources."""
    return {"PYTHONPATH": str(ROOT / "src")}
