"""No process and no file outlives a runtime, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime import roots

from ..conftest import AGENTS, Server, alive, wait_for

pytestmark = pytest.mark.slow


def fill(server: Server) -> tuple[list[int], Path]:
    """Sessions with children of their own. Returns every process of the runtime and its root folder."""
    for _ in range(3):
        server.invoke({"do": "spawn"}, new_session_id())
    state = Path(server.view.get("/_local/status")["state_dir"])
    root = Path(json.loads((state / "server.json").read_text())["root"])
    wanted = f"{roots.MARKER}={roots.marker(root)}".encode()
    pids = [pid for pid, env in roots._environments() if wanted in env]
    assert len(pids) >= 7  # template, three sessions, three children
    return pids, root


# Both signals end in the same handler.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_graceful_stop_leaves_nothing_and_exits_0(start_server: Callable[..., Server], number: signal.Signals) -> None:
    server = start_server(agent=AGENTS / "bare.py")
    pids, root = fill(server)
    assert server.stop(number) == 0, server.output.read_text()
    assert not any(alive(pid) for pid in pids)
    assert not root.exists()
    assert not server.ready_file.exists()
    assert "Traceback" not in server.output.read_text()


# Of the tier "process" the next test has the same with its template killed too.
@pytest.mark.parametrize("tier", ["auto", pytest.param("process", marks=pytest.mark.nightly)])
def test_killed_runtime_leaves_no_process_and_a_restart_cleans_its_files(
    start_server: Callable[..., Server], tmp_path: Path, tier: str
) -> None:
    options = ("--state-dir", str(tmp_path / "state"), "--isolation", tier)
    server = start_server(*options, agent=AGENTS / "bare.py")
    pids, root = fill(server)
    server.stop(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert list((tmp_path / "state" / "sessions").glob("*/*")) == []
    start_server(*options, agent=AGENTS / "bare.py")
    assert not root.exists()


def test_the_folder_of_a_session_that_ended_just_before_its_runtime_goes_with_the_template(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server("--state-dir", str(tmp_path / "state"), agent=AGENTS / "bare.py")
    session = new_session_id()
    server.invoke({"do": "spawn"}, session)
    found = server.session(session)
    assert found is not None
    template = server.template_pid()
    os.kill(server.process.pid, signal.SIGSTOP)  # it learns of nothing any more
    os.kill(found["pid"], signal.SIGKILL)
    wait_for(lambda: not alive(found["pid"]))
    assert list((tmp_path / "state" / "sessions").glob("*/*")) != []
    server.stop(signal.SIGKILL)
    wait_for(lambda: not alive(template))
    assert list((tmp_path / "state" / "sessions").glob("*/*")) == []


def test_a_runtime_that_starts_lets_the_template_of_a_killed_one_remove_its_folders(
    start_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # no runtime of another test sweeps there
        monkeypatch.setenv("TMPDIR", short)
        server = start_server("--state-dir", str(tmp_path / "state"), agent=AGENTS / "bare.py")
        pids, root = fill(server)
        template = server.template_pid()
        os.kill(template, signal.SIGSTOP)  # as on a busy machine, where its turn comes late
        server.stop(signal.SIGKILL)
        monkeypatch.setattr(roots, "TEMPLATES_S", 60.0)
        sweeping = threading.Thread(target=roots.sweep, args=(root.parent,))
        sweeping.start()
        sweeping.join(1)
        assert alive(template)
        os.kill(template, signal.SIGCONT)
        sweeping.join(120)
        assert not any(alive(pid) for pid in pids)
        assert list((tmp_path / "state" / "sessions").glob("*/*")) == []
        assert not root.exists()


@pytest.mark.threat(
    who="a session",
    tries="go on, in a process that left its group, when the runtime and its template are killed at once",
    stopped_by="its pid namespace ends, or the process above the template adopts and kills it",
    leaves="that process killed as well: what is left then ends at the next start",
)
@pytest.mark.parametrize(
    ("tier", "start"),
    [
        ("namespaces", "fork"),
        pytest.param("namespaces", "exec", marks=pytest.mark.nightly),  # the pid namespace ends in both
        ("landlock", "exec"),
        ("process", "fork"),
        pytest.param("landlock", "fork", marks=pytest.mark.nightly),  # both adopt by the process above the template
        pytest.param("process", "exec", marks=pytest.mark.nightly),
    ],
)
def test_runtime_and_template_killed_together_leave_no_process_and_the_next_removes_the_files(
    start_server: Callable[..., Server], tmp_path: Path, tier: str, start: str
) -> None:
    options = ("--state-dir", str(tmp_path / "state"), "--isolation", tier, "--start", start)
    server = start_server(*options, agent=AGENTS / "bare.py")
    pids, root = fill(server)
    template = server.template_pid()
    os.kill(server.process.pid, signal.SIGSTOP)
    os.kill(template, signal.SIGKILL)
    server.stop(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    start_server(*options, agent=AGENTS / "bare.py")
    assert len(list((tmp_path / "state" / "sessions").glob("*/*"))) == 0
    roots.sweep(roots.base_dir())
    assert not root.exists()


def test_it_ends_when_its_parent_does(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    code = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--agent",
    "probe={AGENTS / "bare.py"}", "--ready-file", "{ready}", "--parent-pid", str(os.getpid())])
while not os.path.exists("{ready}"):
    time.sleep(0.05)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, stdout=subprocess.DEVNULL)
    info = wait_for(lambda: json.loads(ready.read_text()) if ready.exists() else {"pid": 0})
    wait_for(lambda: not (info["pid"] and alive(info["pid"])))


def test_taken_port_is_named_and_exits_2(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", "--port", port],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert f"port {port}" in done.stderr


def test_state_folder_in_use_is_refused(start_server: Callable[..., Server], tmp_path: Path) -> None:
    start_server("--state-dir", str(tmp_path / "state"), agent=AGENTS / "bare.py")
    command = [
        sys.executable,
        "-m",
        "agentcore_rl_toolkit.cli",
        "runtime",
        "serve",
        "--state-dir",
        str(tmp_path / "state"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "in use by another runtime" in done.stderr


def test_temporary_folder_holds_only_live_roots(server: Server) -> None:
    base = Path(tempfile.gettempdir()) / f"agentcore-rl-{os.getuid()}"
    assert base.stat().st_mode & 0o077 == 0
    assert any(s["url"] == server.url for s in roots.live_servers())


@pytest.mark.threat(
    who="a session",
    tries="leave folders that the runtime cannot remove, and that keep every later one from starting",
    stopped_by="clean-up goes by descriptor, without recursion; what cannot be removed is moved aside and the start goes on",
    leaves="disk that a kept folder takes until somebody who may removes it",
)
@pytest.mark.parametrize("tier", ["auto", pytest.param("process", marks=pytest.mark.nightly)])
def test_deep_folders_are_removed_at_the_end_of_a_session_and_at_the_next_start(
    start_server: Callable[..., Server], tmp_path: Path, tier: str
) -> None:
    options = ("--state-dir", str(tmp_path / "state"), "--isolation", tier)
    server = start_server(*options, agent=AGENTS / "hoarder.py")
    session_id, survivor = new_session_id(), new_session_id()
    server.invoke({"do": "nest", "levels": 1_500, "mode": 0o000}, session_id)
    server.default_client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    wait_for(lambda: server.ended(session_id))
    folders = tmp_path / "state" / "sessions"
    wait_for(lambda: not list(folders.glob("*/*")))
    server.invoke({"do": "nest", "levels": 1_500, "mode": 0o000}, survivor)
    template = server.template_pid()
    os.kill(server.process.pid, signal.SIGSTOP)
    os.kill(template, signal.SIGKILL)
    server.stop(signal.SIGKILL)
    assert list(folders.glob("*/*"))
    started = start_server(*options, agent=AGENTS / "bare.py")
    assert started.invoke({"do": "echo"}, new_session_id())
    assert not (tmp_path / "state" / "kept").exists()


@pytest.mark.parametrize("tier", [pytest.param("landlock", marks=pytest.mark.nightly), "process"])
def test_a_killed_template_takes_all_its_sessions_started_and_the_next_call_loads_another(
    start_server: Callable[..., Server], tier: str
) -> None:
    server = start_server("--isolation", tier, agent=AGENTS / "bare.py")
    pids, _ = fill(server)
    os.kill(server.template_pid(), signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    assert server.invoke({"do": "echo"}, new_session_id())["calls"] == 1


def test_a_runtime_killed_while_an_agent_loads_leaves_nothing(tmp_path: Path) -> None:
    agent, started = tmp_path / "slow.py", tmp_path / "started"
    agent.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'part')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(started)!r})\n"
        "time.sleep(600)\n"
    )
    server = Server(tmp_path, "--isolation", "process", agent=agent, wait=False)
    wait_for(started.exists)
    pids = [int(word) for word in started.read_text().split()]
    server.stop(signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids))
