"""The directory store: atomic under a kill, durable when asked, safe across fork, honest about what a file system cannot do."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ConfigError, ObjectNotFoundError, StoreError, StorePermissionError
from agentcore_rl_toolkit.store import open_store
from agentcore_rl_toolkit.store.local import SessionFolder


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("durable", "at_least"), [(True, 4), (False, 0)])
async def test_a_durable_put_syncs_the_file_and_each_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, at_least: int
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = open_store(f"file://{tmp_path}")
    await store.put_async("e/i/s.json", b"{}", create_only=True, durable=durable)
    assert len(synced) == at_least
    if durable:
        assert re.fullmatch(r"\.tmp-[0-9a-f]{16}", synced[0].removeprefix(f"{tmp_path}/e/i/"))
        assert synced[1:] == [f"{tmp_path}/e/i", f"{tmp_path}/e", f"{tmp_path}"]


@pytest.mark.parametrize(
    ("code", "folder", "found"),
    [
        (errno.EIO, "", StoreError),
        (errno.EIO, "e/", StoreError),
        (errno.EACCES, "", StorePermissionError),
        (errno.EACCES, "e/", ["f/k"]),
        (errno.EACCES, ".session-1/", ["e/k", "f/k"]),
        (errno.ENOENT, "", []),
    ],
)
def test_a_folder_that_cannot_be_listed_is_an_error_if_a_retry_may_help_or_the_store_itself_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, folder: str, found: Any
) -> None:
    store, scandir = open_store(f"file://{tmp_path}"), os.scandir
    SessionFolder(tmp_path, "1").make()
    for key in ("e/k", "f/k"):
        store.put(key, b"")

    def failing(path: str) -> Any:
        if path == f"{tmp_path}/{folder}":
            raise OSError(code, os.strerror(code))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    if isinstance(found, list):
        assert [info.key for info in store.list(timeout_s=0)] == found
    else:
        with pytest.raises(StoreError) as caught:
            store.list(timeout_s=0)
        assert type(caught.value) is found


@pytest.mark.parametrize(
    ("code", "error", "permanent"),
    [
        (errno.ELOOP, ObjectNotFoundError, False),
        (errno.ENXIO, ObjectNotFoundError, False),
        (errno.EROFS, StorePermissionError, True),
        (errno.EPERM, StorePermissionError, True),
        (errno.ENOSPC, StoreError, False),
        (errno.ENAMETOOLONG, StoreError, True),
    ],
)
def test_an_error_of_the_file_system_is_one_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[StoreError], permanent: bool
) -> None:
    store = open_store(f"file://{tmp_path}")

    def failing(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StoreError) as caught:
        store.get("e/k", timeout_s=0)
    assert (type(caught.value), caught.value.permanent) == (error, permanent)


def test_a_part_of_a_key_has_at_most_255_bytes(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    store.check_writable(f"e/{'a' * 255}/k")
    with pytest.raises(
        ConfigError, match=f"^'e/{'é' * 78}'...: a part of a key has at most 255 bytes; shorten its id$"
    ):
        store.check_writable(f"e/{'é' * 128}/k")


def test_a_killed_writer_leaves_no_object_and_no_visible_trace(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from agentcore_rl_toolkit.store import open_store\n"
        "store = open_store('file://' + sys.argv[1])\n"
        "print('go', flush=True)\n"
        "i = 0\n"
        "while True:\n"
        "    store.put(f'e/{i}', b'x' * 30_000_000, create_only=i % 2 == 0)\n"
        "    i += 1\n"
    )
    for delay_s in (0.01, 0.05, 0.12):
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay_s)
            writer.send_signal(signal.SIGKILL)
        for found in open_store(f"file://{tmp_path}").list():
            assert found.size == 30_000_000
            open_store(f"file://{tmp_path}").delete(found.key)


async def test_a_failed_put_cleans_up_after_itself(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    await store.put_async("e/k/below", b"1")
    with pytest.raises(StoreError, match="Is a directory"):
        await store.put_async("e/k", b"2")
    with pytest.raises(StoreError, match="ot a directory"):
        await store.put_async("e/k/below/deeper", b"2")
    assert [name for _, _, files in os.walk(tmp_path) for name in files] == ["below"]


def test_parent_and_forked_child_both_keep_working(tmp_path: Path) -> None:
    code = (
        "import os, sys, asyncio\n"
        "from agentcore_rl_toolkit.store import open_store\n"
        "store = open_store('file://' + sys.argv[1])\n"
        "store.put('parent/1', b'1')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    store.put('child/1', b'1')\n"
        "    asyncio.run(store.put_async('child/2', b'1'))\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "store.put('parent/2', b'1')\n"
        "print([o.key for o in store.list()])\n"
    )
    assert run(code, str(tmp_path)).stdout.strip() == "['child/1', 'child/2', 'parent/1', 'parent/2']"


def test_objects_in_a_sessions_folder_belong_to_the_store_and_are_moved_there(tmp_path: Path) -> None:
    folder, store = SessionFolder(tmp_path, "1"), open_store(f"file://{tmp_path}")
    folder.make()
    own = open_store(f"file://{folder.path}")  # as the session sees it
    own.put("e/i/s.json", b"of the session", create_only=True)
    own.put("e/i/s.alive", b"beat")
    own.put("e/i/first.json", b"forged")
    store.put("e/i/first.json", b"first")
    assert [info.key for info in store.list("e/")] == ["e/i/first.json", "e/i/s.alive", "e/i/s.json"]
    assert [info.key for info in own.list("")] == ["e/i/first.json", "e/i/s.alive", "e/i/s.json"]
    assert [info.key for info in store.list("")] == [info.key for info in own.list("")]
    assert (store.get("e/i/s.json"), store.get("e/i/first.json")) == (b"of the session", b"first")
    before = store.head("e/i/s.json")
    store.delete("e/i/s.alive")
    (folder.path / "e" / "i" / "link.json").symlink_to("/etc/passwd")
    folder.merge()
    assert store.head("e/i/s.json") == before
    assert store.get("e/i/first.json") == b"first"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["e", "first.json", "i", "s.json"]


def test_an_object_is_found_at_every_moment_while_it_is_moved(tmp_path: Path) -> None:
    store, ended = open_store(f"file://{tmp_path}"), threading.Event()

    def end_sessions() -> None:
        for n in range(100):
            folder = SessionFolder(tmp_path, str(n))
            folder.make()
            open_store(f"file://{folder.path}").put(f"e/i/{n}.json", b"record", durable=False)
            written.append(f"e/i/{n}.json")
            folder.merge()
        ended.set()

    written: list[str] = []
    thread = threading.Thread(target=end_sessions)
    thread.start()
    while not ended.is_set():
        known = list(written)
        assert {info.key for info in store.list("e/i/")} >= set(known)
        assert [store.get(key) for key in known[-1:]] == [b"record"] * len(known[-1:])
    thread.join()
