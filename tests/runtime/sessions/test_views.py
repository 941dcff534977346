"""Rollouts that write to the agent's project: each finds what it wrote itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.isolation import sandbox
from agentcore_rl_toolkit.isolation.view import MAX_BYTES, MAX_FILES

from ..conftest import Server, shown

needs_sandbox = pytest.mark.skipif(sandbox.no_sandbox() is not None, reason=f"no sandbox here: {sandbox.no_sandbox()}")
TOOL = """
import os, subprocess
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
@app.entrypoint
def call(payload):
    own = subprocess.Popen(["sleep", "600"])
    said = [subprocess.run(["kill", str(pid)], capture_output=True).returncode for pid in (*payload["pids"], own.pid)]
    return {"said": said, "own": own.wait(), "pid": os.getpid()}
app.run()
"""
RUNS_CODE = """
import os, subprocess, sys
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
open("/tmp/loaded.txt", "w").write("by the template")
@app.entrypoint
def solve(payload):
    if "write" in payload:
        open("/tmp/solution.py", "w").write(payload["write"])
    said = subprocess.run([sys.executable, "/tmp/solution.py"], capture_output=True, text=True)
    return {"said": said.stdout, "loaded": open("/tmp/loaded.txt").read(), "files": sorted(os.listdir(os.environ["TMPDIR"]))}
app.run()
"""
# It runs the shell command of its payload. Its child serves a socket in a folder of /tmp.
RUNS_SHELL = """
import os, socket, subprocess, time
from pathlib import Path
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
CACHE = os.environ["CACHE"] = os.path.expanduser("~/cached")  # as libraries do when they are imported
SOCKET = Path("/tmp/.X11-unix/X99")
SERVER = f'''
import socket
server = socket.socket(socket.AF_UNIX)
server.bind("{SOCKET}")
server.listen()
while True:
    server.accept()[0].sendall(b"served")
'''
if LOADS:
    SOCKET.parent.mkdir()
    subprocess.Popen(["python3", "-c", SERVER])
    while not SOCKET.exists():
        time.sleep(0.01)
    for number in range(600):
        Path(f"/tmp/{number}").write_text("by the template")
    Path("/tmp/large").write_bytes(bytes(40 * 2**20))
    for path in (CACHE, "/dev/shm/loaded"):
        Path(path).write_text("by the template")
@app.entrypoint
def call(payload):
    if "shell" in payload:
        done = subprocess.run(payload["shell"], shell=True, capture_output=True, text=True)
        return {"said": done.stdout + done.stderr}
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(SOCKET))
    return {"said": client.recv(9).decode()}
if __name__ == "__main__":
    app.run()
"""
SHARES_MEMORY = """
from multiprocessing import Pool, shared_memory
def read(name):
    memory = shared_memory.SharedMemory(name)
    return bytes(memory.buf[:2])
memory = shared_memory.SharedMemory(create=True, size=8)
memory.buf[:2] = b"ab"
with Pool(1) as pool:
    print(pool.apply(read, [memory.name]))
memory.unlink()
"""
AGENT = """
import os, sqlite3
from pathlib import Path
from bedrock_agentcore.runtime import BedrockAgentCoreApp
app = BedrockAgentCoreApp()
FILE = Path({file})
@app.entrypoint
def visit(payload):
    with sqlite3.connect(FILE) as database:
        database.execute("insert into visits values (?)", [payload["name"]])
    return {{"visits": [name for name, in database.execute("select name from visits")]}}
app.run()
"""


def project(folder: Path, file: str) -> Path:
    """Write an agent with a database beside its file; ``file`` is the expression that finds the database."""
    (folder / "agent.py").write_text(AGENT.format(file=file))
    with contextlib.closing(sqlite3.connect(folder / "visits.db")) as database:
        database.execute("create table visits (name)")
    return folder / "agent.py"


def visits_of(folder: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(folder / "visits.db")) as database:
        return [name for (name,) in database.execute("select name from visits")]


@needs_sandbox
def test_rollouts_write_to_a_database_of_the_project_and_read_only_their_own_rows(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server(agent=project(tmp_path, "__file__).with_name('visits.db'"))
    template = server.view.get("/_local/status")["templates"][0]
    if template["no_view"] is not None:
        pytest.skip(f"the kernel allows no view: {template['no_view']}")
    first, second = new_session_id(), new_session_id()
    assert server.invoke({"name": "alpha"}, first) == {"visits": ["alpha"]}
    assert server.invoke({"name": "beta"}, second) == {"visits": ["beta"]}
    assert server.invoke({"name": "gamma"}, first) == {"visits": ["alpha", "gamma"]}
    assert visits_of(tmp_path) == []
    found = server.command(first, f"grep -aoE 'alpha|beta|gamma' {tmp_path}/visits.db")
    assert set(shown(found).split()) == {"alpha", "gamma"}


def test_without_a_view_each_rollout_gets_a_copy_of_what_the_option_names(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    agent = project(tmp_path, "'visits.db'")
    server = start_server("--isolation", "none", "--copy", str(tmp_path / "visits.db"), agent=agent)
    for name in ("a", "b"):
        assert server.invoke({"name": name}) == {"visits": [name]}
    assert visits_of(tmp_path) == []


@needs_sandbox
def test_a_session_finds_no_folder_log_or_socket_of_another_session(server: Server) -> None:
    if server.view.get("/_local/status")["templates"][0]["no_view"] is not None:
        pytest.skip("the kernel allows no view")
    first, second = new_session_id(), new_session_id()
    folder = Path(server.invoke({"do": "where"}, first)["cwd"])
    own = Path(server.invoke({"do": "where"}, second)["cwd"])
    session = server.session(first)
    assert session is not None
    logs, sockets = Path(session["log"]).parent, folder.parents[3] / "s" / folder.parent.name
    for shared, seen in ((folder.parent, own.name), (logs, ""), (sockets, "")):
        assert len(list(shared.iterdir())) >= 2  # outside
        assert shown(server.command(second, f"ls {shared}")).split() == seen.split(), shared


@needs_sandbox
@pytest.mark.skipif(ctypes.CDLL(None).syscall(444, None, 0, 1) < 6, reason="the kernel limits no signals")
def test_a_tool_that_kills_processes_ends_only_those_of_its_session(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(TOOL)
    server = start_server(agent=tmp_path / "agent.py")
    if server.view.get("/_local/status")["templates"][0]["no_view"] is not None:
        pytest.skip("the kernel allows no view")
    first = new_session_id()
    with subprocess.Popen(["sleep", "600"]) as outside:
        other = server.invoke({"pids": []}, first)
        found = server.invoke({"pids": [outside.pid, other["pid"]]})
        alive = outside.poll() is None, server.invoke({"pids": []}, first)["pid"] == other["pid"]
        outside.kill()
    assert (found["said"], found["own"], alive) == ([1, 1, 0], -15, (True, True))


@needs_sandbox
def test_sessions_that_use_the_same_file_in_tmp_do_not_meet(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(RUNS_CODE)
    server = start_server(agent=tmp_path / "agent.py")
    if server.view.get("/_local/status")["templates"][0]["no_view"] is not None:
        pytest.skip("the kernel allows no view")
    first, second = new_session_id(), new_session_id()
    server.invoke({"write": "print('first')"}, first)
    server.invoke({"write": "print('second')"}, second)
    expected = {"said": "first\n", "loaded": "by the template", "files": []}
    assert server.invoke({}, first) == expected
    assert shown(server.command(second, "cat /tmp/solution.py; ls -d /tmp/view-*")) == "print('second')"


@needs_sandbox
def test_a_tmp_that_is_writable_by_an_option_is_that_of_this_machine(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp", mode="r") as file:
        agent = tmp_path / "agent.py"
        agent.write_text(RUNS_CODE.replace("/tmp/solution.py", file.name).replace("/tmp/loaded.txt", "/dev/null"))
        server = start_server("--writable", "/tmp", agent=agent)
        assert server.invoke({"write": "print('shared')"})["said"] == "shared\n"
        assert file.read() == "print('shared')"


def runs_shell(folder: Path, *, loads: bool = False) -> Path:
    """Write an agent that runs shell commands; ``loads``: its file leaves something in /tmp and /dev/shm."""
    (folder / "agent.py").write_text(RUNS_SHELL.replace("LOADS", str(loads)))
    return folder / "agent.py"


@needs_sandbox
def test_what_the_agents_file_leaves_in_tmp_home_and_shared_memory_is_each_sessions_own_and_bounded(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server(agent=runs_shell(tmp_path, loads=True))
    if server.view.get("/_local/status")["templates"][0]["no_view"] is not None:
        pytest.skip("the kernel allows no view")
    write = "for f in $CACHE $CACHE-new /tmp/1 /tmp/new /dev/shm/loaded /dev/shm/new; do echo first >$f; done; rm /tmp/large"
    assert server.invoke({"shell": write})["said"] == ""
    assert "Read-only file system" in server.invoke({"shell": "echo first >/dev/new"})["said"]
    limits = "df --output=size,itotal -B 1 $CACHE /tmp /dev/shm | tail -n 3 | tr -s ' '"
    assert server.invoke({"shell": limits})["said"] == f"{MAX_BYTES} {MAX_FILES}\n" * 3
    second = new_session_id()
    read = "cat $CACHE /tmp/1 /dev/shm/loaded; wc -c </tmp/large; ls /tmp /dev/shm $(dirname $CACHE) | grep new"
    assert server.invoke({"shell": read}, second)["said"] == f"{'by the template' * 3}{40 * 2**20}\n"
    assert server.invoke({}, second)["said"] == "served"
    assert server.invoke({"shell": f"{sys.executable} -c '{SHARES_MEMORY}'"}, second)["said"] == "b'ab'\n"


@needs_sandbox
def test_a_var_tmp_that_is_writable_by_an_option_is_that_of_this_machine_and_tmp_is_not(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", mode="r") as file:
        server = start_server("--writable", "/var/tmp", agent=runs_shell(tmp_path))
        name = Path(file.name).name
        said = server.invoke({"shell": f"echo shared >{file.name}; cat /tmp/{name}"})["said"]
        assert (file.read(), said.startswith("cat: /tmp/")) == ("shared\n", True), said


@needs_sandbox
def test_an_agent_in_var_tmp_has_a_view_of_its_project(start_server: Callable[..., Server]) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        server = start_server(agent=runs_shell(Path(folder)))
        said = server.invoke({"shell": f"ls {folder}; echo x >{folder}/new || true"})["said"]
        assert (said, sorted(os.listdir(folder))) == ("agent.py\n", ["agent.py"])


@needs_sandbox
@pytest.mark.skipif(ctypes.CDLL(None).syscall(444, None, 0, 1) < 6, reason="the kernel limits no signals")
def test_a_command_that_kills_processes_ends_only_its_own(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(agent=runs_shell(tmp_path))
    if server.view.get("/_local/status")["templates"][0]["no_view"] is not None:
        pytest.skip("the kernel allows no view")
    with subprocess.Popen(["sleep", "600"]) as outside:
        kills = f"kill {outside.pid}; echo $?; sleep 600 & kill $!; wait $!; echo $?"
        found, status = shown(server.command(new_session_id(), kills)), outside.poll()
        outside.kill()
    assert (found, status) == ("1\n143\n", None)
