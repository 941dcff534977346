"""Folders that a session has made hard to remove and to measure."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.runtime.launcher import trees

NOBODY = 65534
# Run as an ordinary user, with few descriptors: what root's powers would hide shows.
TRY = """
import json, os, resource, sys
sys.path.insert(0, {source!r})
import importlib.util
spec = importlib.util.spec_from_file_location("trees", {source!r} + "/trees.py")
trees = importlib.util.module_from_spec(spec)
sys.modules["trees"] = trees
spec.loader.exec_module(trees)
resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
folder = sys.argv[1]
{code}
"""


def nest(folder: Path, levels: int, *, mode: int | None = None, beside: bool = False) -> None:
    """Folders in folders, further down than any path reaches; a file of 100 kB in the last one."""
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 60, dir_fd=fd)
        if beside:
            os.mkdir("e", dir_fd=fd)
            os.close(os.open("e/file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
        below = os.open("d" * 60, os.O_RDONLY, dir_fd=fd)
        if mode is not None:
            os.fchmod(fd, mode)
        os.close(fd)
        fd = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(file, bytes(100_000))
    os.close(file)
    os.close(fd)


def as_ordinary_user(code: str, folder: Path) -> str:
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    python = "/usr/bin/python3" if os.geteuid() == 0 else sys.executable
    source = str(Path(trees.__file__).parent)
    done = subprocess.run(
        [python, "-c", TRY.format(source=source, code=textwrap.dedent(code)), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **identity,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout).strip()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that an ordinary user can reach, which pytest's own are not; in memory where possible: disks are slow here."""
    shm = "/dev/shm"
    path = Path(tempfile.mkdtemp(prefix="trees-test-", dir=shm if os.access(shm, os.W_OK) else None))
    path.chmod(0o777)
    yield path
    trees.remove(path)


@pytest.mark.parametrize(("levels", "beside"), [(3_000, False), (700, True)])
def test_folders_beyond_every_path_are_measured_and_removed(shared: Path, levels: int, beside: bool) -> None:
    folder = shared / "deep"
    nest(folder, levels, beside=beside)
    found = trees.measure(folder)
    entries = levels * 3 if beside else levels
    assert found.missed == 0
    assert found.bytes >= 100_000 + entries * trees.ENTRY_BYTES
    assert trees.measure(folder, most=50_000).bytes < 60_000  # it need not be known how much more there is
    assert trees.remove(folder) is None
    assert not folder.exists()


@pytest.mark.slow
def test_any_number_of_levels_takes_as_many_descriptors_as_ten(shared: Path) -> None:
    code = """
        os.mkdir(folder)
        fd = os.open(folder, os.O_RDONLY)
        for number in range(10_000):
            os.mkdir("d", dir_fd=fd)
            if number % 10 == 0:
                os.mkdir("e", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
        found = trees.measure(folder)
        print(found.bytes >= 11_000 * trees.ENTRY_BYTES, found.missed, trees.remove(folder), os.path.exists(folder))
    """
    assert as_ordinary_user(code, shared / "deep") == "True 0 None False"


@pytest.mark.parametrize("mode", [0o000, 0o500, 0o300, 0o400])
def test_folders_without_permissions_are_measured_and_removed_by_their_owner(shared: Path, mode: int) -> None:
    code = f"""
        from pathlib import Path
        fd = None
        os.makedirs(folder + "/a/b/c/" + "/".join("x" * 80))
        for path, _, _ in list(os.walk(folder, topdown=False)):
            Path(path, "file").write_bytes(bytes(10_000))
            if path != folder:
                os.chmod(path, {mode})
        found = trees.measure(folder)
        print(found.bytes > 84 * 10_000, found.missed, oct(os.stat(folder + "/a").st_mode & 0o777))
        print(trees.remove(folder), os.path.exists(folder))
    """
    mine = shared / "mine"
    assert as_ordinary_user(code, mine) == f"True 0 {oct(mode)}\nNone False"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_removes_what_belongs_to_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / "others"
    nest(folder, 5)
    for path, names, files in os.walk(folder):
        for name in (*names, *files):
            os.chown(os.path.join(path, name), NOBODY, NOBODY)
            os.chmod(os.path.join(path, name), 0)
    assert trees.measure(folder).bytes >= 100_000
    assert trees.remove(folder) is None
    assert not folder.exists()


def test_what_cannot_be_removed_is_named_and_everything_else_goes(shared: Path) -> None:
    """Somebody else's folder, which nobody but root can empty; an ordinary user can move it, at most."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of somebody else")
    mine, theirs = shared / "mine", shared / "mine" / "in" / "theirs"
    theirs.mkdir(parents=True)
    (theirs / "file").write_text("stays")
    (mine / "in" / "gone").write_text("")
    for path in (mine, mine / "in"):
        os.chown(path, NOBODY, NOBODY)
    answer = as_ordinary_user("print(trees.remove(folder), os.listdir(folder), os.listdir(folder + '/in'))", mine)
    assert "'theirs': Operation not permitted ['in'] ['theirs']" in answer


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "file").write_bytes(bytes(100_000))
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "link").symlink_to(tmp_path / "outside")
    (folder / "self").symlink_to(folder)
    os.mkfifo(folder / "in" / "pipe")
    assert trees.measure(folder).bytes < 50_000
    assert trees.remove(folder) is None
    (tmp_path / "direct").symlink_to(tmp_path / "outside")
    assert trees.remove(tmp_path / "direct") is None
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deep", "file", "outside"]


def test_removing_stops_when_told_to_and_goes_on_later(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    nest(folder, 50)
    assert "more than could be removed" in (trees.remove(folder, within_s=0.0) or "")
    assert folder.exists()
    assert trees.remove(folder, stop=lambda: True) is not None
    assert trees.remove(folder) is None


def test_measuring_survives_a_tree_that_moves_meanwhile(shared: Path) -> None:
    folder = shared / "folder"
    nest(folder, 300, beside=True)
    over = threading.Event()

    def move() -> None:
        fd = os.open(folder, os.O_RDONLY)
        try:
            while not over.is_set():
                os.rename("d" * 60, "other", src_dir_fd=fd, dst_dir_fd=fd)
                os.rename("other/" + "d" * 60, "away", src_dir_fd=fd, dst_dir_fd=fd)
                os.rename("away", "other/" + "d" * 60, src_dir_fd=fd, dst_dir_fd=fd)
                os.rename("other", "d" * 60, src_dir_fd=fd, dst_dir_fd=fd)
        finally:
            os.close(fd)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        found = [trees.measure(folder) for _ in range(30)]
    finally:
        over.set()
        mover.join()
    assert all(f.bytes >= 1_000 for f in found)  # it ended, each time, with what it had seen
    assert trees.measure(folder).missed == 0
    assert trees.measure(shared / "absent") == trees.Usage(0)
