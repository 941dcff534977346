"""Writing a store: what a commit holds, who may write, what is given back to the disk."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.capture.record import (
    OK,
    CallRecord,
    ChoiceRecord,
    decode,
    pack_ids,
    pack_logprobs,
)
from agentcore_rl_toolkit.gateway.store.reader import Reader
from agentcore_rl_toolkit.gateway.store.schema import FILE, connect
from agentcore_rl_toolkit.gateway.store.writer import Store
from scripted_engine import ScriptedEngine

from ..asking import Start, opened, until
from ..asking import status_of as ask


class Held:
    """A session, as far as the store is concerned."""

    records, last_call_s = 0, 0.0

    def __init__(self, number: int) -> None:
        self.number = number

    def refuse(self) -> None:
        pass


def record(call_id: str, *, tokens: int = 2, choices: int = 1, **other: Any) -> CallRecord:
    entries = [
        ChoiceRecord(
            index=place,
            ids=pack_ids(range(place, place + tokens)),
            logprobs=pack_logprobs([-0.5] * tokens),
            finish_reason="stop",
            parse_status="none",
            message=b'{"role":"assistant","content":"x"}',
        )
        for place in range(choices)
    ]
    values: dict[str, Any] = {
        "index": 0,
        "status": OK,
        "dialect": "chat",
        "model": "m",
        "started_s": 1.0,
        "finished_s": 2.0,
        "weight_version_first": 3,
        "messages": b"[]",
        "prompt_ids": pack_ids([1, 2]),
        **other,
    }
    return CallRecord(call_id=call_id, choices=entries, **values)


def put(store: Store, name: str) -> Held:
    session = Held(store.next_session)
    store.next_session += 1
    store.put_session(session.number, name, 1.0, None, "{}")
    return session


@pytest.mark.parametrize("directory", [True, False])
def test_calls_come_back_as_they_were(tmp_path: Path, directory: bool) -> None:
    store = Store(tmp_path if directory else None)
    session = put(store, "one")
    wrote = [
        record("a"),
        record("b", choices=3, digest=-(2**63), usage=b"{}", request=b"{}", error="\u00e4\x00"),
        record("c", choices=0, status="error", http_status=500, model=None, delivered=False),
        record("d", tokens=100_000),
    ]
    numbers = [store.append(session, each) for each in wrote]
    assert (numbers, session.number, session.records, session.last_call_s) == ([1, 2, 3, 4], 1, 4, 2.0)
    store.commit()
    assert [decode(payload) for payload in map(store.reader.call, store.reader.numbers(session.number))] == wrote
    assert [decode(store.reader.call(number)) for number in numbers] == wrote
    store.deliver(numbers[0], whole=False)
    store.commit()
    assert not decode(store.reader.call(numbers[0])).delivered
    found = store.reader.counts()[session.number]
    assert (found.calls, found.turns, found.undelivered) == (4, 3, 1)
    store.close()


async def test_calls_of_a_pass_are_one_transaction(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.start(asyncio.get_running_loop())
    session = put(store, "one")
    await store.kept()
    waiting = []
    for name in ("a", "b"):
        store.append(session, record(name))
        waiting.append(asyncio.ensure_future(store.kept()))
    beside = Reader(connect(tmp_path / FILE, read_only=True), None)
    assert beside.numbers(session.number) == []
    async with asyncio.timeout(30):
        assert await asyncio.gather(*waiting) == [None, None]
    assert [decode(payload).call_id for payload in map(beside.call, beside.numbers(session.number))] == ["a", "b"]
    beside.close()
    await store.stop()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_caller_that_is_cancelled_strands_no_other(tmp_path: Path, refused: bool) -> None:
    store = Store(tmp_path)
    session = put(store, "one")
    store.commit()
    waiting = []
    for name in ("a", "b"):
        store.append(session, record(name))
        waiting.append(asyncio.ensure_future(store.kept()))
    await asyncio.sleep(0)
    waiting[0].cancel()
    store.start(asyncio.get_running_loop())
    if refused:
        store._database.execute("PRAGMA query_only=ON")
    store.commit()
    assert (store.failed is not None) is refused  # only a locked file is tried again
    async with asyncio.timeout(30):
        assert (await waiting[1] is None) is not refused
    store.close()


def test_a_second_gateway_on_a_store_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="is in use by another gateway"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


async def test_a_file_that_another_program_locks_makes_calls_wait_and_is_named_in_the_end(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(engine, store_dir=str(tmp_path))
    client = GatewayClient(gateway.url)
    session = await opened(gateway)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.ensure_future(ask(session))
    await until(lambda: engine.calls and gateway.store.queue_depth)
    assert (await client.health_async())["status"] == "ok"  # the loop does not wait
    assert not waiting.done()
    other.execute("ROLLBACK")
    assert await waiting == 200
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.store.writer._LOCKED_S", 0.1)
    other.execute("BEGIN IMMEDIATE")
    assert await ask(session) == 503
    assert "is locked" in str(gateway.store.failed)
    other.execute("ROLLBACK")
    other.close()
    await until(lambda: gateway.store.failed is None)
    assert await ask(session) == 200
    assert len((await client.fetch_async([session.session_id]))[session.session_id].turns) == 2


@pytest.mark.parametrize("directory", [True, False])
async def test_calls_of_deleted_sessions_are_removed_also_after_a_kill(
    tmp_path: Path, directory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.store.reader._SESSIONS_AT_ONCE", 6)
    store = Store(tmp_path if directory else None)
    store.start(asyncio.get_running_loop())
    sessions = [put(store, f"session-{k}") for k in range(20)]
    for session in sessions:
        for k in range(20):
            store.append(session, record(f"{session.number}-{k}", tokens=2000, choices=1 + k % 2))
    await store.kept()
    assert [row.session_id for row in store.reader.sessions()] == [f"session-{k}" for k in range(20)]
    for session in sessions[1:]:
        store.delete_session(session.number)
    await store.kept()
    assert [row.session_id for row in store.reader.sessions()] == ["session-0"]
    if directory:  # as a kill leaves it: gone, but not removed
        await store.stop()
        store = Store(tmp_path)
        store.start(asyncio.get_running_loop())
    assert len(store.removing) == 19
    while store.removing:
        store.tend()
    assert len(store.reader.numbers(sessions[0].number)) == 20
    assert store.reader.query("SELECT count(*) FROM calls") == [(20,)]
    assert store.next_session > sessions[-1].number
    await store.stop()


async def test_removals_wait_for_the_fetches_that_began_before_the_deletion(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.start(asyncio.get_running_loop())
    session = put(store, "s")
    for k in range(5):
        store.append(session, record(str(k), tokens=200_000))
    await store.kept()

    def fetch() -> AsyncGenerator[bytes, None]:
        return store.read(lambda reader: map(reader.call, reader.numbers(session.number)))

    earlier, later = fetch(), fetch()
    assert await anext(earlier)
    store.delete_session(session.number)
    await store.kept()
    assert await anext(later)
    store.tend()
    assert len(store.reader.numbers(session.number)) == 5
    assert sum([len(piece) async for piece in earlier]) > 5_000_000
    while store.removing:  # also while later fetches run
        store.tend()
    assert not store.reader.numbers(session.number)
    await later.aclose()
    await store.stop()


async def test_the_size_of_a_store_is_at_least_that_of_its_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.start(asyncio.get_running_loop())
    store.append(put(store, "s"), record("a", tokens=20_000))
    assert await store.kept() is None
    files = sum(map(os.path.getsize, (f"{store.path}", f"{store.path}-wal")))
    assert store.total_bytes >= files > 160_000
    await store.stop()


async def test_a_long_log_is_moved_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes() -> list[int]:
        return [os.path.getsize(f"{store.path}{end}") for end in ("", "-wal")]

    store = Store(tmp_path)
    store.start(asyncio.get_running_loop())
    store.append(put(store, "s"), record("a", tokens=20_000))
    await store.kept()
    assert sizes()[1] > 160_000
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.store.writer.WAL_BYTES", 160_000)
    store.tend()
    await until(lambda: sizes()[1] < 160_000)
    assert sizes()[0] > 160_000
    await store.stop()


async def test_calls_are_read_in_pieces_of_one_to_two_megabytes(tmp_path: Path) -> None:
    items = [b"a" * (2**20 - 1), b"b", b"c" * 2_500_000, b"d" * 2**20]
    store = Store(tmp_path)
    pieces = [piece async for piece in store.read(lambda _: iter(items))]
    assert all(2**20 <= len(piece) <= 2**21 for piece in pieces[:-1])
    assert b"".join(pieces) == b"".join(items)
    store.close()


WRITES = """
import asyncio, sys
from pathlib import Path
from agentcore_rl_toolkit.gateway.store import writer
from tests.gateway.store.test_writer import Store, put, record

async def main():
    writer.WAL_BYTES = 200_000  # checkpoints, too, are killed
    store = Store(Path(sys.argv[1]))
    store.start(asyncio.get_running_loop())
    sessions = [put(store, f"{sys.argv[2]}-{k}") for k in range(8)]
    k = 0
    while True:
        names = []
        for session in sessions:
            k += 1
            names.append(name := f"{sys.argv[2]}.{k}")
            store.append(session, record(name, tokens=200))
        assert await store.kept() is None
        sys.stdout.write("".join(name + "\\n" for name in names))
        sys.stdout.flush()
        if k % 40 == 0:
            store.delete_session(put(store, f"{name}-gone").number)
        store.tend()
        await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.nightly
def test_what_was_said_to_be_stored_is_there_wherever_the_process_is_killed(tmp_path: Path) -> None:
    rng = random.Random(7)
    entries: list[str] = []
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    for run in range(100 if os.environ.get("AGENTCORE_RL_NIGHTLY") else 6):
        line = [sys.executable, "-c", WRITES, str(tmp_path / "store"), str(run)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(1, 400)):
                entries.append(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
            entries += process.stdout.read().split("\n")[:-1]
    reader = Reader(connect(tmp_path / "store" / FILE, read_only=True), None)
    found = [name for (name,) in reader.query("SELECT call_id FROM calls")]
    assert len(found) == len(set(found))
    assert set(entries) <= set(found)
    assert len(entries) > 300
    assert reader.query("PRAGMA integrity_check") == [("ok",)]
    assert all(decode(reader.call(n)).call_id for (n,) in reader.query("SELECT number FROM calls"))
    reader.close()


def test_a_private_store_of_a_killed_gateway_is_removed_and_one_that_is_just_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new = tmp_path / "agentcore-rl-calls-old", tmp_path / "agentcore-rl-calls-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "lock").touch()
    os.utime(old / "lock", (1, 1))
    store = Store(None)
    assert (old.exists(), new.exists()) == (False, True)
    store.close()
