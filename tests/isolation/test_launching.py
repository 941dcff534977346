"""The contract with launchers: which pid, which status, which signals; commands beside a session."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import NOBODY, ROOT, SYSTEM_PYTHON, Launcher, Session, linux_only

pytestmark = linux_only


@pytest.mark.parametrize("plain_fork", [False, True])
def test_the_status_is_the_sessions(launcher: Launcher, plain_fork: bool) -> None:
    exits = Session("say(1); raise SystemExit(7)", plain_fork=plain_fork)
    # The first process of a pid namespace cannot kill itself; elsewhere it can.
    code = "import os\nsay(1)\nif os.getpid() != 1: os.kill(os.getpid(), 9)\nraise SystemExit(9)"
    first, second = launcher.run(exits, Session(code, plain_fork=plain_fork))
    assert first.status == 7, launcher.errors
    assert second.status == (9 if launcher.tier == "namespaces" else -9)


@pytest.mark.parametrize("plain_fork", [False, True])
def test_sigterm_reaches_the_sessions_handler(launcher: Launcher, plain_fork: bool) -> None:
    target = Session(
        "import signal, time\n"
        "def stop(*_):\n    open('stopped', 'w').close(); raise SystemExit(3)\n"
        "signal.signal(signal.SIGTERM, stop); open('armed', 'w').close(); say(1)\nfor _ in range(400): time.sleep(0.05)",
        plain_fork=plain_fork,
    )
    process = launcher.start(target)
    folder = launcher.folder / "s0"
    try:
        _until((folder / "armed").exists)
        os.kill(_first_child(process.pid), signal.SIGTERM)
        _until((folder / "stopped").exists)
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert json.loads(out)[0]["status"] == 3, errors


SLOW_TO_STAY = """
import os, signal, sys, time
from pathlib import Path
from agentcore_rl_toolkit.isolation import IsolationSpec
from agentcore_rl_toolkit.isolation.linux import namespaces
fork = os.fork
def slow():
    child = fork()
    if child:
        time.sleep(1)
    return child
os.fork = slow
namespaces._split(IsolationSpec(session_dir=Path.cwd()))
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
print("armed", flush=True)
time.sleep(60)
"""


def test_a_signal_that_comes_before_the_one_that_stays_behind_is_ready_reaches_the_session() -> None:
    """On a machine with much to do the session may be up before the process that passes signals on has run again."""
    with subprocess.Popen([sys.executable, "-c", SLOW_TO_STAY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"armed\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 3


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_environment_is_the_specs(launcher: Launcher) -> None:
    [result] = launcher.run(Session("import os; say(dict(os.environ))", env={"ONLY": "this", "PATH": "/usr/bin"}))
    assert {k: v for k, v in result.reported.items() if k != "LC_CTYPE"} == {"ONLY": "this", "PATH": "/usr/bin"}


def test_a_session_starts_in_its_folder(launcher: Launcher) -> None:
    assert launcher.one("import os; say(os.getcwd())") == str(launcher.folder / "s0")


def test_programs_run_inside(launcher: Launcher) -> None:
    code = "import subprocess; say(subprocess.run(['/bin/sh', '-c', 'echo $((40+2))'], capture_output=True, text=True).stdout)"
    assert launcher.one(code) == "42\n"


def test_the_interpreter_still_imports_what_it_had_not_yet(launcher: Launcher) -> None:
    assert launcher.one(
        "import sqlite3, email.mime.text, xml.dom.minidom, multiprocessing; say(sqlite3.sqlite_version)"
    )


def test_threads_processes_and_shared_memory_work_inside(launcher: Launcher) -> None:
    code = """
import concurrent.futures, multiprocessing, tempfile, os
os.environ["TMPDIR"] = os.getcwd(); tempfile.tempdir = None
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    threads = sum(pool.map(abs, range(5)))
try:
    multiprocessing.get_context("fork").Lock()
    lock = "lock"
except OSError:
    lock = "refused"
say([threads, lock])
"""
    # /dev/shm is everybody's where it cannot be a private one, so the Landlock tier leaves it out; its report says so.
    assert launcher.one(code) == [10, "refused" if launcher.tier == "landlock" else "lock"]


def test_a_command_beside_a_session_shares_its_view(launcher: Launcher) -> None:
    base = Session("import time\nopen('here', 'w').write('x'); say(1); time.sleep(30)", stays=True)
    command = Session("[sorted(__import__('os').listdir('.')), __import__('os').getppid()]", into=0)
    _, result = launcher.run(base, command)
    assert result.reported is not None, launcher.errors
    assert result.reported[0] == ["here"]
    if launcher.tier == "namespaces":
        assert result.reported[1] == 0


def test_a_command_sees_the_private_tmp_of_its_session(namespaces: Launcher) -> None:
    base = Session("import time\nopen('/tmp/mark', 'w').write('x'); say(1); time.sleep(30)", stays=True)
    caps = "open('/proc/self/status').read().count('CapEff:\\t0000000000000000')"
    command = Session(f"[__import__('os').listdir('/tmp').count('mark'), {caps}]", into=0)
    _, result = namespaces.run(base, command)
    assert result.reported == [1, 1], namespaces.errors


@pytest.mark.parametrize("user", ["self", "ordinary"])
def test_a_template_can_be_confined_wherever_it_is_started_from(tmp_path: Path, user: str) -> None:
    """The folder a runtime is started in is none that sessions see."""
    if user == "ordinary" and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = Path(tempfile.mkdtemp(prefix="probe-", dir="/tmp"))
    code, place = folder / "code", folder / "place"
    shutil.copytree(ROOT, code)
    place.mkdir()
    folder.chmod(0o755)
    place.chmod(0o777)
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if user == "ordinary" else {}
    script = code / "isolation" / "boot.py"
    try:
        command = [SYSTEM_PYTHON, "-I", str(script), "isolation.run", "probe-loader", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, **identity)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
