"""Runtimes that start at the same moment, each of which removes the roots of those that are gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentcore_rl_toolkit.runtime import roots

START = """
from agentcore_rl_toolkit.runtime.roots import new_root
for number in range(60):
    root = new_root()
    (root.path / "mine").write_text(str(number))
    assert (root.path / "mine").read_text() == str(number)
    root.release() if number % 2 else root.discard()  # every other one is killed, as it were
"""


def test_nobody_takes_a_root_that_was_just_made_and_none_is_left() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # roots hold sockets, whose paths must be
        start_and_sweep({"TMPDIR": short, "PATH": "/usr/bin:/bin"})


def test_a_root_that_is_swept_before_its_lock_is_held_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    take = roots.lock
    taken: list[Path] = []

    def swept(path: Path, *, create: bool = True) -> roots.Locked | None:
        locked = take(path, create=create)
        if path.name.startswith(f"{os.getpid()}-"):
            taken.append(path)
            if len(taken) == 1:
                shutil.rmtree(path)
        return locked

    monkeypatch.setattr(roots, "lock", swept)
    before = psutil.Process().num_fds()
    root = roots.new_root()
    try:
        assert len(taken) == 2
        assert psutil.Process().num_fds() == before + 1
    finally:
        root.discard()


def start_and_sweep(environment: dict[str, str]) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", START], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    output = [process.communicate(timeout=300)[1] for process in running]
    assert [(p.returncode, text) for p, text in zip(running, output, strict=True)] == [(0, "")] * 6
    sweep = "from agentcore_rl_toolkit.runtime.roots import base_dir, sweep; sweep(base_dir()); print(*base_dir().iterdir())"
    done = subprocess.run([sys.executable, "-c", sweep], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def start_marked(root: Path) -> subprocess.Popen[bytes]:
    """A process such as a runtime with this root starts."""
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], env={roots.MARKER: roots.marker(root)}
    )


@pytest.fixture
def other() -> Iterator[tuple[roots.Locked, subprocess.Popen[bytes]]]:
    """A runtime's root, its lock held, and a process of it."""
    root = roots.new_root()
    process = start_marked(root.path)
    yield root, process
    process.kill()
    process.wait()
    root.discard()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.threat(
    who="a damaged or foreign file",
    tries="end another runtime's processes through a copied state folder, whose server.json names them",
    stopped_by="the processes of a root are ended only when nobody holds the root's lock",
    leaves="",
)
def test_a_copied_state_folder_ends_nobodys_processes(
    other: tuple[roots.Locked, subprocess.Popen[bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, process = other
    roots.describe_server(tmp_path, {"root": str(root.path), "url": "http://127.0.0.1:1"})
    state, _ = roots.own_state(tmp_path)
    state.release()
    assert process.poll() is None
    assert "which is running" in caplog.text
    root.release()  # as when it is killed
    state, _ = roots.own_state(tmp_path)
    state.release()
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"root": 7}', '{"root": "/"}', '{"root": "a\\u0000b"}', '{"a":' * 100_000, '{"root": "\\ud800"}'],
)
def test_a_server_json_that_says_nothing_sensible_keeps_no_runtime_from_starting(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)
    state, sessions = roots.own_state(tmp_path)
    state.release()
    assert list(sessions.iterdir()) == []
    assert not Path("/lock").exists()  # a name in a file is no reason to make files there


def test_a_server_json_that_is_a_pipe_or_a_link_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "server.json")
    roots.own_state(tmp_path)[0].release()
    (tmp_path / "server.json").unlink()
    (tmp_path / "server.json").symlink_to("/dev/zero")
    roots.own_state(tmp_path)[0].release()


def left_by_somebody_else(folder: Path) -> Path:
    """What the ordinary user that the test becomes cannot remove, only move."""
    theirs = folder / "theirs"
    theirs.mkdir(parents=True)
    (theirs / "file").write_text("stays")
    return theirs


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another user cannot remove")
def test_what_cannot_be_removed_is_said_once_and_kept_and_the_start_goes_on() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        state = Path(name) / "state"
        theirs = left_by_somebody_else(state / "sessions" / "agent" / "1")
        for path in (Path(name), state, state / "sessions", state / "sessions" / "agent", theirs.parent):
            os.chown(path, 65534, 65534)
        (state / "sessions" / "agent" / "2").mkdir()
        os.chown(state / "sessions" / "agent" / "2", 65534, 65534)
        entries = []
        for _ in range(3):
            done = subprocess.run(
                ["/usr/bin/python3", "-c", OWN.format(source=SOURCE), str(state)],
                capture_output=True,
                text=True,
                timeout=300,
                check=True,
                user=65534,
                group=65534,
                extra_groups=[],
            )
            assert done.stdout.strip() == "sessions []"
            entries.append(done.stderr)
        assert "cannot be removed" in entries[0]
        assert "Permission denied" in entries[0] or "Operation not permitted" in entries[0]
        assert entries[1:] == ["", ""]
        kept = list((state / "kept").iterdir())
        assert len(kept) == 1
        assert "stays" in {p.read_text() for p in kept[0].rglob("file")}
        roots.own_state(state)[0].release()  # root can
        assert not (state / "kept").exists()


SOURCE = str(Path(roots.__file__).parents[1])
OWN = """
import os, sys, types
from pathlib import Path
for name, path in (("agentcore_rl_toolkit", {source!r}), ("agentcore_rl_toolkit.runtime", {source!r} + "/runtime")):
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from agentcore_rl_toolkit.runtime import roots
locked, sessions = roots.own_state(Path(sys.argv[1]))
print(sessions.name, os.listdir(sessions))
"""


def test_sessions_get_a_folder_of_another_name_where_theirs_cannot_be_moved(tmp_path: Path) -> None:
    stuck = tmp_path / "sessions"
    (stuck / "agent").mkdir(parents=True)
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", str(stuck)], check=False).returncode != 0:
        pytest.skip("nothing can be made immutable here")
    try:
        state, sessions = roots.own_state(tmp_path)
        state.release()
        assert sessions.name.startswith("sessions-")
        assert list(sessions.iterdir()) == []
        assert (stuck / "agent").exists()
    finally:
        subprocess.run(["chattr", "-i", str(stuck)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their environment on Linux only")
def test_a_process_that_is_only_starting_its_program_is_found() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # whoever starts a program is on before that has its environment
    try:
        for _ in range(20):
            with subprocess.Popen(["/bin/sleep", "300"], env={roots.MARKER: "this"}) as program:
                shown = list(roots._shown([program.pid]))
                program.kill()
            assert shown
            assert shown[0][1] == [f"{roots.MARKER}=this".encode(), b""]
    finally:
        os.sched_setaffinity(0, cores)
