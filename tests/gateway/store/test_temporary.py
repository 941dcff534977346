"""Stores that killed gateways left behind: removed by a later one, and nothing else with them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest

import agentcore_rl_toolkit
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.store import temporary
from agentcore_rl_toolkit.gateway.testing import ScriptedEngine

MODEL = str(Path(agentcore_rl_toolkit.__file__).parent / "policy" / "weights")
SWEEP = """
import sys
from pathlib import Path
from agentcore_rl_toolkit.gateway.store import temporary
sys.stdin.readline()
print(len(temporary.sweep(Path(sys.argv[1]))))
"""


class Served:
    """A gateway process without ``--store``, and the folder it made."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
        self.process = process
        self.url = url
        self.folder = folder

    def kill(self) -> None:
        """All of its processes at once, as when memory runs out or the container goes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        give_up_s = time.monotonic() + 10
        for lock in self.folder.rglob("lock"):  # the other processes are nobody's to wait for
            with lock.open() as file:
                while time.monotonic() < give_up_s:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(0.01)


Serve = Callable[..., "asyncio.Future[Served]"]


@pytest.fixture
async def serve(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Serve]:
    running: list[subprocess.Popen[bytes]] = []
    parent = Path(tempfile.mkdtemp())  # short: the addresses of Unix sockets end after 107 bytes

    async def start(*words: str) -> Served:
        ready = tmp_path / f"ready-{len(running)}.json"
        line = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "gateway", "serve", "--engine", "vllm"]
        line += ["--no-admin-key"]  # found through TMPDIR, which is another one here
        line += ["--upstream", engine.url, "--ready-file", str(ready), "--parent-pid", str(os.getpid()), *words]
        before = set(os.listdir(parent))
        environment = {**os.environ, "TMPDIR": str(parent)}
        process = await asyncio.to_thread(subprocess.Popen, line, env=environment, start_new_session=True)
        running.append(process)
        async with asyncio.timeout(40):
            while not ready.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
        [made] = [name for name in os.listdir(parent) if name not in before and name.startswith(temporary.PREFIX)]
        return Served(process, json.loads(ready.read_text())["url"], parent / made)

    yield lambda *words: asyncio.ensure_future(start(*words))
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(parent)


async def use(url: str) -> None:
    [session] = await GatewayClient(url).create_sessions_async([new_session_id()])
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as llm:
        await llm.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def age(folder: Path, *, days: float = 1.5) -> None:
    then = time.time() - days * 86400
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


def store(parent: Path, name: str = "x") -> Path:
    """What a killed gateway leaves, made by hand."""
    folder = parent / (temporary.PREFIX + name)
    folder.mkdir(mode=0o700)
    for file in ("lock", "secret", "calls-00000001.log"):
        (folder / file).write_bytes(b"x" * 40)
    age(folder)
    return folder


@pytest.mark.parametrize("words", [(), ("--model", MODEL)])
async def test_what_a_killed_gateway_leaves_is_removed_a_day_later(
    engine: ScriptedEngine, serve: Serve, words: tuple[str, ...]
) -> None:
    engine.first_id, engine.last_id = 300, 500
    gateway = await serve(*words)
    await use(gateway.url)
    age(gateway.folder)
    assert temporary.sweep(gateway.folder.parent) == []  # it runs
    gateway.kill()
    age(gateway.folder, days=0.9)
    assert temporary.sweep(gateway.folder.parent) == []  # somebody may still want it
    age(gateway.folder)
    for path in gateway.folder.rglob("calls-*.log"):
        os.utime(path)
        assert temporary.sweep(gateway.folder.parent) == []  # a single file of it is young
        age(gateway.folder)
    assert temporary.sweep(gateway.folder.parent) == [gateway.folder.name]
    assert not gateway.folder.exists()


async def test_a_gateway_removes_what_another_left_and_its_own_folder_when_it_stops(serve: Serve) -> None:
    first = await serve()
    first.kill()
    age(first.folder)
    second = await serve()
    assert not first.folder.exists()
    second.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(second.process.wait, 20) == 0
    assert not second.folder.exists()


def test_a_new_folder_is_private_and_old_stores_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = store(tmp_path)
    made = Path(temporary.make())
    assert list(tmp_path.iterdir()) == [made]
    assert made.name.startswith(temporary.PREFIX)
    assert made.stat().st_mode & 0o777 == 0o700
    assert not old.exists()


@pytest.mark.parametrize(
    "what",
    [
        "a foreign file",
        "a foreign folder",
        "a link to a file",
        "calls without a lock",
        "a lock that is a link",
    ],
)
def test_folders_that_are_more_or_less_than_a_store_stay(tmp_path: Path, what: str) -> None:
    folder = store(tmp_path)
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    if what == "a foreign file":
        (folder / "notes.txt").write_text("keep")
    elif what == "a foreign folder":
        (folder / "turns").mkdir()  # what a trainer's gateway has
    elif what == "a link to a file":
        (folder / "calls-00000002.log").symlink_to(outside)
    elif what == "calls without a lock":
        (folder / "lock").unlink()
    else:
        (folder / "lock").unlink()
        (folder / "lock").symlink_to(outside)
    age(folder)
    before = sorted(folder.rglob("*"))
    assert temporary.sweep(tmp_path) == []
    assert sorted(folder.rglob("*")) == before
    assert outside.read_bytes() == b"mine"


def test_links_and_files_of_that_name_and_other_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = store(tmp_path / "elsewhere")
    (tmp_path / (temporary.PREFIX + "link")).symlink_to(real)
    (tmp_path / (temporary.PREFIX + "file")).write_bytes(b"")
    other = store(tmp_path, "y").rename(tmp_path / "agentcore-rl-other")
    age(tmp_path)
    assert temporary.sweep(tmp_path) == []
    assert (real / "secret").exists()
    assert (other / "secret").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    folder = store(tmp_path)
    os.chown(folder, 65534, 65534)
    assert temporary.sweep(tmp_path) == []
    assert (folder / "secret").exists()


def test_empty_folders_go_and_a_folder_that_is_not_there_is_no_trouble(tmp_path: Path) -> None:
    empty = tmp_path / (temporary.PREFIX + "empty")
    empty.mkdir()
    age(empty)
    assert temporary.sweep(tmp_path) == [empty.name]
    assert temporary.sweep(tmp_path / "none") == []


def test_gateways_that_start_at_once_share_the_work(tmp_path: Path) -> None:
    for i in range(200):
        store(tmp_path, f"{i}")
    sweepers = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEP, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for sweeper in sweepers:
        assert sweeper.stdin is not None
        sweeper.stdin.write("go\n")
        sweeper.stdin.flush()
    told = [sweeper.communicate(timeout=30) for sweeper in sweepers]
    assert [sweeper.returncode for sweeper in sweepers] == [0, 0, 0], told
    assert list(tmp_path.iterdir()) == []
    assert sum(int(out) for out, _ in told) <= 200
