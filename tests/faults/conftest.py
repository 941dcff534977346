"""The world of the fault suite: a local runtime with real sessions, an S3 server, and a proxy before it that can refuse.

What each test found is printed as one table at the end of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import Deadlines, RolloutClient, WatchSettings
from agentcore_rl_toolkit.client.testing import TEST_CREDENTIALS
from agentcore_rl_toolkit.store import ObjectStore, open_store

HERE = Path(__file__).parent
BUCKET = "results"
AGENTS = ("plain", "throttled", "dropped_before", "dropped_after", "duplicated", "broken_start", "failing", "killed")
AGENTS += ("never_up", "killed_at_once")
FAULTS = [
    {"kind": "throttle", "operation": "InvokeAgentRuntime", "agent": "throttled", "every": 2},
    {"kind": "quota", "operation": "InvokeAgentRuntime", "agent": "throttled", "first": 3},
    {"kind": "throttle", "operation": "StopRuntimeSession", "agent": "throttled", "every": 2},
    {"kind": "drop", "operation": "InvokeAgentRuntime", "agent": "dropped_before", "every": 2, "when": "before"},
    {"kind": "drop", "operation": "InvokeAgentRuntime", "agent": "dropped_after", "every": 2, "when": "after"},
    {"kind": "duplicate", "operation": "InvokeAgentRuntime", "agent": "duplicated"},
    {"kind": "kill", "operation": "InvokeAgentRuntime", "agent": "killed", "every": 2, "delay_s": 0.5},
    {"kind": "server_error", "operation": "InvokeAgentRuntime", "agent": "broken_start", "first": 2},
    {"kind": "server_error", "operation": "InvokeAgentRuntime", "agent": "failing", "every": 3},
    {"kind": "init_timeout", "operation": "InvokeAgentRuntime", "agent": "never_up"},
    {"kind": "kill", "operation": "InvokeAgentRuntime", "agent": "killed_at_once"},
]
ROWS: list[tuple[str, str, str, str, str, str]] = []


class Proxy:
    """Forwards TCP to the S3 server; while `refusing`, answers every request with 503 instead."""

    def __init__(self, upstream: str) -> None:
        host, port = upstream.removeprefix("http://").rstrip("/").split(":")
        self._upstream = (host, int(port))
        self.refusing = False
        self.refused = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up: asyncio.StreamWriter | None = None
        back: asyncio.Task[None] | None = None
        try:
            while data := await reader.read(65536):
                if self.refusing:
                    self.refused += 1
                    writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    await writer.drain()
                    return
                if up is None:
                    down, up = await asyncio.open_connection(*self._upstream)
                    back = asyncio.create_task(self._pump(down, writer))
                up.write(data)
                await up.drain()
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            if back is not None:
                back.cancel()
            for w in (up, writer):
                if w is not None:
                    w.close()

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            return
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@dataclass
class World:
    """What the tests share."""

    url: str
    arns: dict[str, str]
    proxy: Proxy
    runs_dir: Path
    ledgers: Path
    clients: list[RolloutClient] = field(default_factory=list)

    def open_store(self) -> ObjectStore:
        return open_store(BUCKET, endpoint_url=self.proxy.url, region="us-west-2")

    def client(self, exp_id: str, agent: str = "plain", **options: Any) -> RolloutClient:
        """A client that takes a session for lost after four seconds of silence."""
        options = {
            "endpoint_url": self.url,
            "tps_limit": 200,
            "watch": WatchSettings(heartbeat_s=0.5, lost_after_s=4.0, store=self.open_store()),
            "deadlines": Deadlines(start_s=30, confirm_s=3, stop_s=30),
            **options,
        }
        client = RolloutClient(self.arns[agent], BUCKET, exp_id, **options)
        self.clients.append(client)
        return client

    def live_sessions(self) -> list[str]:
        """Sessions that the runtime still has."""
        with urllib.request.urlopen(self.url + "/_local/sessions", timeout=10) as answer:
            return [s["session_id"] for s in json.load(answer)["sessions"]]

    def no_session_left(self, within_s: float = 60.0) -> bool:
        deadline_s = time.monotonic() + within_s
        while self.live_sessions():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.1)
        return True

    def runs(self, session_ids: list[str]) -> Counter[str]:
        """Session id -> how often its agent was started."""
        counts: Counter[str] = Counter()
        for session_id in session_ids:
            path = self.runs_dir / session_id
            counts[session_id] = len(path.read_text().splitlines()) if path.exists() else 0
        return counts

    def records(self, exp_id: str) -> Counter[str]:
        """Input id -> records in the store."""
        found: Counter[str] = Counter()
        for item in self.open_store().list(exp_id + "/"):
            if item.key.endswith(".json"):
                found[item.key.split("/")[1]] += 1
        return found


def wait_for(path: Path, process: subprocess.Popen[bytes], within_s: float = 180.0) -> dict[str, Any]:
    deadline_s = time.monotonic() + within_s
    while not path.exists():
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        assert time.monotonic() < deadline_s, f"{path} did not appear"
        time.sleep(0.05)
    answer: dict[str, Any] = json.loads(path.read_text())
    return answer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("faults")
    runs_dir = root / "runs"
    runs_dir.mkdir()
    before = {name: os.environ.get(name) for name in TEST_CREDENTIALS}
    os.environ.update(TEST_CREDENTIALS)
    (root / "faults.json").write_text(json.dumps(FAULTS))
    base = [sys.executable, "-m", "agentcore_rl_toolkit.cli"]
    pid = ["--parent-pid", str(os.getpid())]
    processes: list[subprocess.Popen[bytes]] = []
    proxy: Proxy | None = None
    try:
        s3_command = [
            "s3",
            "serve",
            "--dir",
            str(root / "s3"),
            "--bucket",
            BUCKET,
            "--ready-file",
            str(root / "s3.json"),
        ]
        processes.append(subprocess.Popen([*base, *s3_command, *pid]))
        proxy = Proxy(wait_for(root / "s3.json", processes[-1])["url"])
        command = ["runtime", "serve", "--ready-file", str(root / "runtime.json"), "--state-dir", str(root / "state")]
        for name in AGENTS:
            command += ["--agent", f"{name}={HERE / 'agent.py'}"]
        command += ["--writable", str(runs_dir), "--session-env", f"RUNS_DIR={runs_dir}", "--s3-endpoint", proxy.url]
        command += ["--memory-mb", "512", "--stop-grace", "5", "--faults", str(root / "faults.json")]
        processes.append(subprocess.Popen([*base, *command, *pid]))
        ready = wait_for(root / "runtime.json", processes[-1])
        shared = World(ready["url"], ready["agents"], proxy, runs_dir, root)
        yield shared
        for client in shared.clients:
            client.close()
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=30)
        if proxy is not None:
            proxy.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture
def row() -> Callable[..., None]:
    """Add a line to the table."""

    def add(fault: str, sent: int, outcomes: Counter[str], *, lost_count: int, twice: int, leaked: int) -> None:
        text = ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))
        ROWS.append((fault, str(sent), text, str(lost_count), str(twice), str(leaked)))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    head = ("fault", "sent", "outcomes", "without outcome", "run twice", "sessions left")
    widths = [max(len(r[i]) for r in [head, *ROWS]) for i in range(len(head))]
    terminalreporter.section("faults")
    for line in (head, tuple("-" * w for w in widths), *ROWS):
        terminalreporter.write_line("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)))
