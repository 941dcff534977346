"""No process outlives its runtime or its template, and the next runtime removes what a killed one left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server, alive, wait_for

pytestmark = pytest.mark.slow
BARE = AGENTS / "bare.py"


def fill(server: Server) -> list[int]:
    """Start sessions, each with a daemon. Returns every process of the runtime."""
    daemons = [server.invoke({"do": "spawn"}, new_session_id())["child"] for _ in range(2)]
    pids = server.processes()
    assert {*daemons, server.template_pid()} < set(pids)
    return pids


def root_of(server: Server) -> Path:
    state = Path(server.view.get("/_local/status")["state_dir"])
    return Path(json.loads((state / "server.json").read_text())["root"])


def test_graceful_stop_leaves_nothing_and_exits_0(start_server: Callable[..., Server]) -> None:
    server = start_server(agent=BARE)
    pids, root = fill(server), root_of(server)
    assert server.stop() == 0, server.output.read_text()
    assert not any(alive(pid) for pid in pids)
    assert not root.exists()
    assert not server.ready_file.exists()
    assert "Traceback" not in server.output.read_text()


def test_a_runtime_ends_although_a_session_has_stopped_its_template(start_server: Callable[..., Server]) -> None:
    server = start_server("--set", "stop_grace=0.2", agent=BARE)
    pids = fill(server)
    os.kill(server.template_pid(), signal.SIGSTOP)
    server.process.terminate()
    assert server.process.wait(25) == 0, server.output.read_text()
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert "Traceback" not in server.output.read_text()


@pytest.mark.parametrize("tier", ["auto", pytest.param("none", marks=pytest.mark.nightly)])
def test_a_killed_runtime_leaves_no_process_and_the_next_removes_its_files(
    start_server: Callable[..., Server], tmp_path: Path, tier: str
) -> None:
    options = ("--state-dir", str(tmp_path / "state"), "--isolation", tier)
    server = start_server(*options, agent=BARE)
    pids, root = fill(server), root_of(server)
    server.stop(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert list((tmp_path / "state" / "sessions").glob("*/*")) != []
    start_server(*options, agent=BARE)
    assert list((tmp_path / "state" / "sessions").glob("*/*")) == []
    assert not root.exists()


def test_a_killed_template_ends_its_sessions_and_the_next_call_loads_another(
    start_server: Callable[..., Server], session_id: str
) -> None:
    server = start_server(agent=BARE)
    server.invoke({}, session_id)
    session, template = server.session(session_id)["pid"], server.template_pid()
    os.kill(template, signal.SIGKILL)
    wait_for(lambda: not alive(session) and server.session(session_id) is None)
    assert server.invoke({}, session_id)["calls"] == 1
    assert server.template_pid() != template


def test_a_runtime_killed_while_an_agent_loads_leaves_nothing(tmp_path: Path) -> None:
    agent, started = tmp_path / "slow.py", tmp_path / "started"
    started.mkdir()
    agent.write_text(f"import os, time\nopen(os.path.join({str(started)!r}, str(os.getpid())), 'w')\ntime.sleep(600)\n")
    server = Server(tmp_path, "--writable", str(started), agent=agent, wait=False)
    pid = int(wait_for(lambda: os.listdir(started))[0])
    server.stop(signal.SIGKILL)
    wait_for(lambda: not alive(pid))


def test_it_ends_when_its_parent_does(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    code = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--agent",
    "probe={BARE}", "--ready-file", "{ready}", "--parent-pid", str(os.getpid())])
while not os.path.exists("{ready}"):
    time.sleep(0.05)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, stdout=subprocess.DEVNULL)
    info = wait_for(lambda: json.loads(ready.read_text()) if ready.exists() else {"pid": 0})
    wait_for(lambda: not (info["pid"] and alive(info["pid"])))
