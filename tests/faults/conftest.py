"""The world of the fault suite: a local runtime with real sessions.

What each test found is printed as one table at the end of the run.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import Deadlines, RolloutClient, WatchSettings
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from agentcore_rl_toolkit.store import ObjectStore, open_store
from scripted_runtime import TEST_CREDENTIALS
from serving import serving, wait_for

HERE = Path(__file__).parent
FAULTS = [
    {"kind": "drop", "operation": "InvokeAgentRuntime", "agent": "dropped_before", "every": 2, "when": "before"},
    {"kind": "drop", "operation": "InvokeAgentRuntime", "agent": "dropped_after", "every": 2, "when": "after"},
    {"kind": "kill", "operation": "InvokeAgentRuntime", "agent": "killed", "every": 2, "delay_s": 0.5},
    {"kind": "runtime_error", "operation": "InvokeAgentRuntime", "agent": "never_up"},
    {"kind": "kill", "operation": "InvokeAgentRuntime", "agent": "killed_at_once"},
]
ROWS: list[tuple[str, str, str, str, str, str]] = []


@dataclass
class World:
    """What the tests share."""

    url: str
    arns: dict[str, str]
    store_url: str
    runs_dir: Path
    ledgers: Path
    clients: list[RolloutClient] = field(default_factory=list)

    def open_store(self) -> ObjectStore:
        return open_store(self.store_url)

    def client(self, exp_id: str, agent: str = "plain", **options: Any) -> RolloutClient:
        """A client that takes a session for lost after four seconds of silence."""
        options = {
            "endpoint_url": self.url,
            "tps_limit": 200,
            "watch": WatchSettings(heartbeat_s=0.5, lost_after_s=4.0),
            "deadlines": Deadlines(start_s=30, confirm_s=3, stop_s=30),
            **options,
        }
        if agent not in self.arns:
            self.arns[agent] = RuntimeView(self.url).deploy(HERE / "agent.py", agent, {})
        client = RolloutClient(self.arns[agent], self.store_url, exp_id, **options)
        self.clients.append(client)
        return client

    def live_sessions(self) -> list[str]:
        """Sessions that the runtime still has."""
        return [s["session_id"] for s in RuntimeView(self.url, timeout_s=10).sessions()]

    def left(self) -> int:
        """How many sessions the runtime still has when they had time to end."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.live_sessions())
        return len(self.live_sessions())

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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("faults")
    runs_dir = root / "runs"
    runs_dir.mkdir()
    store_url = f"file://{root}/store"
    (root / "faults.json").write_text(json.dumps(FAULTS))
    words = ["--state-dir", str(root / "state"), "--faults", str(root / "faults.json"), "--store", store_url]
    words += ["--agent", f"plain={HERE / 'agent.py'}"]
    words += ["--writable", str(runs_dir), "--session-env", f"RUNS_DIR={runs_dir}"]
    words += ["--memory-mb", "512", "--set", "stop_grace=5"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TEST_CREDENTIALS.items():
            patch.setenv(name, value)
        with serving(root, "runtime", "serve", *words) as ready:
            shared = World(ready["url"], ready["agents"], store_url, runs_dir, root)
            yield shared
            for client in shared.clients:
                client.close()


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
