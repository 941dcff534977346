"""Rollouts that write to the agent's project: each finds what it wrote itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.isolation import sandbox
from agentcore_rl_toolkit.isolation.view import MAX_BYTES, MAX_FILES

from ..conftest import Server, shown, write_agent

needs_sandbox = pytest.mark.skipif(sandbox.no_sandbox() is not None, reason=f"no sandbox here: {sandbox.no_sandbox()}")
# It runs the shell command of its payload, or writes to the database of its project. When it is loaded, it may leave files, and
# children that serve sockets in folders of /tmp and of temporary files.
AGENT = """
import socket, sqlite3, tempfile, time
from pathlib import Path
CACHE = os.environ["CACHE"] = os.path.expanduser("~/cached")  # as libraries do when they are imported
SOCKETS = [Path("/tmp/.X11-unix/X99"), Path(tempfile.gettempdir(), "left", "socket")]
SERVER = '''
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
while True:
    server.accept()[0].sendall(b"served")
'''
if LOADS:
    for path in SOCKETS:
        path.parent.mkdir()
        subprocess.Popen(["python3", "-c", SERVER, path])
    while not all(path.exists() for path in SOCKETS):
        time.sleep(0.01)
    for number in range(600):
        Path(f"/tmp/{number}").write_text("by the template")
    Path("/tmp/large").write_bytes(bytes(40 * 2**20))
    for path in (CACHE, "/dev/shm/loaded"):
        Path(path).write_text("by the template")

async def answer(payload, session):
    if "shell" in payload:
        done = subprocess.run(payload["shell"], shell=True, capture_output=True, text=True)
        return done.stdout + done.stderr
    if "visit" in payload:
        with sqlite3.connect(payload["file"]) as database:
            database.execute("insert into visits values (?)", [payload["visit"]])
        return [name for name, in database.execute("select name from visits")]
    found = []
    for path in SOCKETS:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            found.append(client.recv(9).decode())
    return found
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


def project(folder: Path, *, loads: bool = False) -> Path:
    """Write the agent with a database beside its file; ``loads``: its file leaves something in /tmp and /dev/shm."""
    agent = write_agent(folder / "agent.py", AGENT.replace("LOADS", str(loads)))
    with contextlib.closing(sqlite3.connect(folder / "visits.db")) as database:
        database.execute("create table visits (name)")
    return agent


def visits_of(folder: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(folder / "visits.db")) as database:
        return [name for (name,) in database.execute("select name from visits")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if sandbox.no_sandbox() is not None:
        pytest.skip(f"no sandbox here: {sandbox.no_sandbox()}")
    folder = tmp_path_factory.mktemp("views")
    server = Server(folder, agent=project(folder / "project", loads=True))
    no_view = server.view.get("/_local/status")["templates"][0]["no_view"]
    if no_view is None:
        yield server
    assert server.stop() == 0, server.output.read_text()
    if no_view is not None:
        pytest.skip(f"the kernel allows no view: {no_view}")


def test_rollouts_write_to_a_database_of_the_project_and_read_only_their_own_rows(server: Server) -> None:
    folder = server.folder / "project"
    first, second = new_session_id(), new_session_id()

    def visit(name: str, session_id: str) -> object:
        return server.invoke({"visit": name, "file": str(folder / "visits.db")}, session_id)

    assert visit("alpha", first) == ["alpha"]
    assert visit("beta", second) == ["beta"]
    assert visit("gamma", first) == ["alpha", "gamma"]
    assert visits_of(folder) == []
    found = server.command(first, f"grep -aoE 'alpha|beta|gamma' {folder}/visits.db")
    assert set(shown(found).split()) == {"alpha", "gamma"}


def test_without_a_view_each_rollout_gets_a_copy_of_what_the_option_names(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server("--isolation", "none", "--copy", str(tmp_path / "visits.db"), agent=project(tmp_path))
    for name in ("a", "b"):
        assert server.invoke({"visit": name, "file": "visits.db"}) == [name]
    assert visits_of(tmp_path) == []


def test_a_session_finds_no_folder_log_or_socket_of_another_session(server: Server) -> None:
    first, second = new_session_id(), new_session_id()
    folder, own = (Path(server.invoke({"shell": "pwd"}, session_id).strip()) for session_id in (first, second))
    session = server.session(first)
    assert session is not None
    logs, sockets = Path(session["log"]).parent, folder.parents[3] / "s" / folder.parent.name
    for shared, seen in ((folder.parent, own.name), (logs, ""), (sockets, "")):
        assert len(list(shared.iterdir())) >= 2  # outside
        assert shown(server.command(second, f"ls {shared}")).split() == seen.split(), shared


@pytest.mark.skipif(ctypes.CDLL(None).syscall(444, None, 0, 1) < 6, reason="the kernel limits no signals")
def test_a_tool_or_a_command_that_kills_processes_ends_only_its_own(server: Server) -> None:
    first, second = new_session_id(), new_session_id()
    server.invoke({"shell": "true"}, first)
    other = server.session(first)
    assert other is not None
    with subprocess.Popen(["sleep", "600"]) as outside:
        kills = f"for pid in {outside.pid} {other['pid']}; do kill $pid; echo $?; done; sleep 600 & kill $!; wait $!; echo $?"
        found = server.invoke({"shell": kills}, second), shown(server.command(second, kills))
        alive = outside.poll() is None and server.session(first) is not None
        outside.kill()
    assert [text.split("\n")[:3] for text in found] == [["1", "1", "143"]] * 2
    assert alive


@needs_sandbox
def test_a_tmp_that_is_writable_by_an_option_is_that_of_this_machine_and_a_readable_folder_leaves_dev_shm_writable(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp", mode="r") as file, tempfile.TemporaryDirectory(dir="/dev/shm") as data:
        server = start_server("--writable", "/tmp", "--readable", data, agent=project(tmp_path))
        write = f"echo shared >{file.name}; echo written >/dev/shm/new; cat /dev/shm/new; touch {data}/new"
        said = server.invoke({"shell": write})
        assert file.read() == "shared\n"
        assert said.startswith("written\n")
        assert "Read-only file system" in said


def test_what_the_agents_file_leaves_in_tmp_home_and_shared_memory_is_each_sessions_own_and_bounded(
    server: Server,
) -> None:
    first, second = new_session_id(), new_session_id()
    write = "for f in $CACHE $CACHE-new /tmp/1 /tmp/new /dev/shm/loaded /dev/shm/new; do echo first >$f; done; rm /tmp/large"
    assert server.invoke({"shell": f"{write}; ls -A $TMPDIR"}, first) == ""
    assert server.invoke({"shell": "cat /tmp/1 /dev/shm/new"}, first) == "first\n" * 2
    assert shown(server.command(first, "cat /tmp/1")) == "first\n"
    assert "Read-only file system" in server.invoke({"shell": "echo first >/dev/new"})
    limits = "df --output=size,itotal -B 1 $CACHE /tmp /dev/shm | tail -n 3 | tr -s ' '"
    assert server.invoke({"shell": limits}) == f"{MAX_BYTES} {MAX_FILES}\n" * 3
    read = "cat $CACHE /tmp/1 /dev/shm/loaded; wc -c </tmp/large; ls /tmp /dev/shm $(dirname $CACHE) | grep new"
    assert server.invoke({"shell": read}, second) == f"{'by the template' * 3}{40 * 2**20}\n"
    assert server.invoke({}, second) == ["served"] * 2
    assert server.invoke({"shell": f"{sys.executable} -c '{SHARES_MEMORY}'"}, second) == "b'ab'\n"


@needs_sandbox
def test_a_var_tmp_that_is_writable_by_an_option_is_that_of_this_machine_and_tmp_is_not(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", mode="r") as file:
        server = start_server("--writable", "/var/tmp", agent=project(tmp_path))
        said = server.invoke({"shell": f"echo shared >{file.name}; cat /tmp/{Path(file.name).name}"})
        assert (file.read(), said.startswith("cat: /tmp/")) == ("shared\n", True), said


def test_an_agent_in_var_tmp_has_a_view_of_its_project(server: Server) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        arn = server.view.deploy(
            write_agent(Path(folder) / "agent.py", AGENT.replace("LOADS", "False")), "temporary", {}
        )
        said = server.invoke({"shell": f"ls {folder}; echo x >{folder}/new || true"}, arn=arn)
        assert (said, sorted(os.listdir(folder))) == ("agent.py\n", ["agent.py"])
