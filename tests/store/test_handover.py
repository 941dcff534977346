"""A session's store in a directory: what the runtime takes, what the session writes by itself, and what is an error."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentcore_rl_toolkit.errors import StoreError, StorePermissionError
from agentcore_rl_toolkit.runtime.sessions.grants import Grant
from agentcore_rl_toolkit.runtime.sessions.records import Records
from agentcore_rl_toolkit.store import open_store
from agentcore_rl_toolkit.store.handover import HandoverStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel has to say which session connects")
KEY = "exp/a/session.json"


class Session:
    """As a node knows it."""

    def __init__(self, own_directories: Sequence[Path] | None = ()) -> None:
        self.own_directories = own_directories
        self.grants: list[Grant] = []

    def asked_for(self, store: Path) -> Session:
        self.grants.append(Grant(f"file://{store}", frozenset({KEY})))
        return self


@asynccontextmanager
async def runtime(tmp_path: Path, whose: Callable[[int], Session | None]) -> AsyncIterator[HandoverStore]:
    """The store of a session whose runtime takes records; it runs in this process, so this is the one that connects."""
    records = Records(tmp_path / "records", whose)
    await records.start()
    url = f"file://{tmp_path / 'store'}"
    try:
        yield HandoverStore(url, str(records.path), open_store(url))
    finally:
        await records.aclose()


async def test_a_record_that_the_caller_asked_for_is_taken(tmp_path: Path) -> None:
    session = Session().asked_for(tmp_path / "store")
    async with runtime(tmp_path, lambda pid: session) as store:
        await store.put_async(KEY, b"{}", create_only=True)
        assert await store.get_async(KEY) == b"{}"
    assert (tmp_path / "store" / KEY).read_bytes() == b"{}"


async def test_a_heartbeat_does_not_wait_for_records_that_a_busy_disk_does_not_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "exp" / "a").mkdir(parents=True)
    keys = [f"exp/a/s{n}.json" for n in range(8)]
    session = Session()
    session.grants.append(Grant(f"file://{tmp_path}/store", frozenset([*keys, "exp/a/s.alive"])))
    waiting, synced = threading.Semaphore(0), threading.Event()

    def sync(file: int) -> None:
        waiting.release()
        assert synced.wait(60)

    monkeypatch.setattr("agentcore_rl_toolkit.runtime.sessions.records.os.fsync", sync)
    monkeypatch.setattr("agentcore_rl_toolkit.runtime.sessions.records.AT_ONCE", 100)
    async with runtime(tmp_path, lambda pid: session) as store:
        records = [asyncio.ensure_future(store.put_async(key, b"{}")) for key in keys]
        for _ in keys:  # every thread that syncs has one
            assert await asyncio.to_thread(waiting.acquire, timeout=60)
        await store.put_async("exp/a/s.alive", b"{}", durable=False)
        assert not any(record.done() for record in records)
        synced.set()
        await asyncio.gather(*records)


async def test_a_directory_that_a_session_does_not_have_is_an_error_at_once(tmp_path: Path) -> None:
    """It could write there: in a session the folder is its own, and the record would be gone with it."""
    async with runtime(tmp_path, lambda pid: Session([tmp_path / "other"])) as store:
        for work in (store.put_async(KEY, b"{}"), store.get_async(KEY), store.head_async(KEY), store.delete_async(KEY)):
            with pytest.raises(StorePermissionError, match=r"did not ask for this object.*--writable DIR"):
                await work
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("own", ["the directory", "above it", "through a link", "everything"])
async def test_a_directory_that_a_session_has_it_writes_to_by_itself(tmp_path: Path, own: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    directories = {"the directory": "store", "above it": ".", "through a link": "link"}
    session = Session(None if own == "everything" else [tmp_path / directories[own]])
    async with runtime(tmp_path, lambda pid: session) as store:
        await store.put_async(KEY, b"{}")
        await store.delete_async(KEY)
        await store.put_async(KEY, b"[]", create_only=True)
    assert (tmp_path / "store" / KEY).read_bytes() == b"[]"


async def test_a_session_that_the_runtime_does_not_know_yet_tries_again(tmp_path: Path) -> None:
    calls: list[int] = []
    session = Session().asked_for(tmp_path / "store")

    def known_at_the_third_call(pid: int) -> Session | None:
        calls.append(pid)
        return session if len(calls) >= 3 else None

    async with runtime(tmp_path, known_at_the_third_call) as store:
        await store.put_async(KEY, b"{}", create_only=True)
    assert (tmp_path / "store" / KEY).read_bytes() == b"{}"
    assert len(calls) == 3


async def test_a_process_of_no_session_writes_nothing(tmp_path: Path) -> None:
    async with runtime(tmp_path, lambda pid: None) as store:
        with pytest.raises(StoreError, match="no session that this runtime knows is calling"):
            await asyncio.wait_for(store.put_async(KEY, b"{}", timeout_s=0), 20)
    assert not (tmp_path / "store").exists()
