"""What a session that exceeds a limit is told: memory and disk, per tier."""

from __future__ import annotations

import asyncio
import errno
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.isolation.linux import cgroups
from agentcore_rl_toolkit.runtime.launcher import disk
from agentcore_rl_toolkit.runtime.launcher.disk import used_bytes
from agentcore_rl_toolkit.runtime.remote import table

from ..conftest import AGENTS, Server, wait_for

AGENT = AGENTS / "greedy.py"


def refused(server: Server, payload: dict[str, object], session_id: str) -> str:
    """The caller's error."""
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        server.invoke(payload, session_id)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424
    return str(caught.value)


# Without a pid namespace the tiers measure alike.
@pytest.mark.parametrize("tier", ["namespaces", pytest.param("landlock", marks=pytest.mark.nightly), "process"])
def test_a_session_above_a_limit_is_ended_and_says_which(start_server: Callable[..., Server], tier: str) -> None:
    server = start_server("--isolation", tier, "--memory-mb", "150", "--disk-mb", "20", agent=AGENT)
    where = cgroups.detect()
    if where is not None and "memory" in where.controllers:
        session_id = new_session_id()
        assert "memory limit (150 MiB)" in refused(server, {"memory_mb": 400}, session_id)
        ended = wait_for(lambda: server.ended(session_id))
        assert (ended["state"], ended["exit_status"]) == ("crashed", -9)
        assert "memory limit (150 MiB)" in table(server.view.sessions(ended=True))
    session_id, modest = new_session_id(), new_session_id()
    server.invoke({"files": 3, "file_mb": 5}, modest)
    assert "more than its limit (20 MiB)" in refused(server, {"files": 6, "file_mb": 5, "s": 20}, session_id)
    ended = wait_for(lambda: server.ended(session_id))
    assert ended["state"] == "crashed"
    folders = Path(ended["log"]).parents[2] / "sessions"
    wait_for(lambda: not list(folders.glob(f"*{session_id[:32]}*")))
    assert "OSError" in server.invoke({"files": 1, "file_mb": 25}, modest)["error"]  # one file is held at once


def test_disk_is_counted_as_it_is_used_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    (folder / "deep" / "er").mkdir(parents=True)
    empty = used_bytes(folder)
    (tmp_path / "large").write_bytes(b"x" * 10**6)
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "loop").symlink_to(folder)
    with (folder / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert used_bytes(folder) - empty < 10**5
    (folder / "deep" / "er" / "file").write_bytes(b"x" * 10**6)
    assert 10**6 <= used_bytes(folder) - empty < 1.2 * 10**6
    assert used_bytes(tmp_path / "absent") == 0


class Writer:
    """A process that fills a folder as fast as it can, 5 MB a file, up to 2 GB."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log_path = directory / "log"
        self.pid: int | None = None
        self.death: str | None = None
        code = "import time\nfor n in range(400): open(f'f{n}', 'wb').write(bytes(5_000_000))\ntime.sleep(60)"
        self.process = subprocess.Popen([sys.executable, "-c", code], cwd=directory)

    def stop(self, grace_s: float) -> None:
        self.process.kill()


async def test_a_fast_writer_is_noticed_before_it_is_time_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "POLL_S", 1_000.0)
    (tmp_path / "s").mkdir()
    sessions: dict[str, Writer] = {}
    watch = asyncio.create_task(disk.hold_to(100_000_000, sessions))
    await asyncio.sleep(0.3)
    sessions["s"] = writer = Writer(tmp_path / "s")
    try:
        async with asyncio.timeout(30):
            while writer.process.poll() is None:  # noqa: ASYNC110  # polls a process
                await asyncio.sleep(0.01)
        assert writer.death is not None
        assert "more than its limit (95.3674 MiB)" in writer.death
    finally:
        writer.process.kill()
        writer.process.wait()
        watch.cancel()


@pytest.mark.parametrize("what", ["shorten", "_measure"])
async def test_a_round_that_fails_leaves_no_session_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A log on a full disk, say, cannot be cut."""
    monkeypatch.setattr(disk, "POLL_S", 0.01)
    monkeypatch.setattr(disk, "LOOK_S", 0.01)
    real, failed = getattr(disk, what), [OSError(errno.ENOSPC, "No space left on device")]

    def fails_once(*which: Any) -> Any:
        if failed:
            raise failed.pop()
        return real(*which)

    monkeypatch.setattr(disk, what, fails_once)
    (tmp_path / "log").write_bytes(b"x" * 600_000)
    (tmp_path / "file").write_bytes(b"x" * 2_000_000)
    session = Silent(tmp_path)
    watch = asyncio.create_task(disk.hold_to(1_000_000, {"s": session}))
    try:
        await asyncio.wait_for(session.stopped.wait(), 30)
    finally:
        watch.cancel()
    assert session.death is not None
    assert "No space left on device" in caplog.text


class Silent:
    """A session that does nothing."""

    pid: int | None = None
    death: str | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log_path = directory / "log"
        self.stopped = asyncio.Event()

    def stop(self, grace_s: float) -> None:
        self.stopped.set()


@pytest.mark.parametrize("tier", ["namespaces", pytest.param("landlock", marks=pytest.mark.nightly), "process"])
@pytest.mark.threat(
    who="a session",
    tries="use more disk than --disk-mb: removed files held open or mapped, folders of mode 000, paths beyond PATH_MAX",
    stopped_by="folders are measured by descriptor, level by level, and /proc shows what has no name",
    leaves="descriptors on their way between two processes are not seen, nor (but by root) those of a process that hides them",
)
def test_files_out_of_sight_count_towards_the_limit(start_server: Callable[..., Server], tier: str) -> None:
    server = start_server("--isolation", tier, "--disk-mb", "20", agent=AGENTS / "hoarder.py")
    for what in ("open", "map", "child", "deep"):
        session_id = new_session_id()
        server.invoke({"do": what, "mb": 15}, session_id)  # below the limit: it lives
        assert "more than its limit (20 MiB)" in refused(server, {"do": what, "mb": 15, "s": 60}, session_id), what


def test_empty_files_count_too(start_server: Callable[..., Server]) -> None:
    server = start_server("--disk-mb", "1", agent=AGENTS / "hoarder.py")
    answer = refused(server, {"do": "empty", "files": 2_200, "s": 60}, new_session_id())
    assert "more than its limit (1 MiB)" in answer


def test_a_log_is_cut_to_its_end_and_never_ends_a_session(start_server: Callable[..., Server]) -> None:
    server = start_server("--disk-mb", "20", agent=AGENTS / "hoarder.py")
    session_id = new_session_id()
    server.invoke({"do": "log", "mb": 8}, session_id)
    log = Path((server.session(session_id) or {})["log"])
    wait_for(lambda: log.stat().st_size <= 5 * 2**20 and "\nthe last line\n" in log.read_text())
    text = log.read_text()
    assert re.search(
        r"^\[[0-9]+ bytes of this log were cut out", text, re.MULTILINE
    )  # first, unless it wrote at that moment
    assert "\nthe last line\n" in text
    assert server.invoke({"do": "log", "mb": 1}, session_id)
    assert log.read_text().count("the last line") == 2
