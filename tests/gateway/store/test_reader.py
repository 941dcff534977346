"""Reading stores that are damaged, and stores that a gateway is writing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError, GatewayError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient
from agentcore_rl_toolkit.gateway.capture.record import decode
from agentcore_rl_toolkit.gateway.capture.turns import expand
from agentcore_rl_toolkit.gateway.store.reader import Reader
from agentcore_rl_toolkit.gateway.store.schema import FILE, FORMAT, TABLES, connect, trouble
from scripted_engine import ScriptedEngine

from ..asking import Start, opened
from ..asking import status_of as ask

Turns = dict[str, tuple[list[int], list[int]]]


WRITTEN: list[tuple[Path, Turns]] = []  # once for the module


@pytest.fixture
async def written(
    engine: ScriptedEngine, start_gateway: Start, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> tuple[Path, Turns]:
    """A store of nine sessions, and its turns by id. The calls of every third session go on from each other."""
    if not WRITTEN:
        store = tmp_path_factory.mktemp("written") / "store"
        WRITTEN.append((store, await write(await start_gateway(engine, store_dir=str(store)))))
    store, turns = WRITTEN[0]
    return Path(shutil.copytree(store, tmp_path / "written")), turns


async def write(gateway: Gateway) -> Turns:
    client = GatewayClient(gateway.url)
    ids = [new_session_id() for _ in range(9)]
    sessions = await client.create_sessions_async(ids)
    entries: list[str] = []
    for k in range(6):
        entries += [f"question {k}" + " x" * 400, f"answer {k}"]
        for place, session in enumerate(sessions):
            assert await ask(session, *(entries[:-1] if place % 3 == 0 else [f"alone {k}"])) == 200
    found = await client.fetch_async(ids, close=False)
    await gateway.stop()
    turns = {t.turn_id: (t.prompt_ids, t.completion_ids) for c in found.values() for t in c.turns}
    assert len(turns) == 54
    return turns


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(store: Path) -> Turns:
    """What can be read of it. Raises: GatewayError, ConfigError."""
    path, turns = store / FILE, {}
    try:
        reader = Reader(connect(path, read_only=True), path)
    except sqlite3.Error as e:
        raise GatewayError(trouble(e, path)) from e
    with contextlib.closing(reader):
        for session in reader.sessions():
            for turn in expand([decode(payload) for payload in reader.readable(reader.numbers(session.number))]).turns:
                turns[turn.turn_id] = (turn.prompt_ids, turn.completion_ids)
    return turns


async def test_flipped_bytes_make_nothing_up_and_leave_what_lies_elsewhere(
    written: tuple[Path, Turns], tmp_path: Path
) -> None:
    """Wherever they are: what is read is what was recorded, and what cannot be read is said."""
    store, turns = written
    size, rng = (store / FILE).stat().st_size, random.Random(5)
    whole, least, refusals = 0, len(turns), []
    for k in range(60):
        copy = tmp_path / f"d{k}"
        shutil.copytree(store, copy)
        with (copy / FILE).open("r+b") as file:
            file.seek(rng.randrange(size))
            spoiled = bytes(each ^ 1 << rng.randrange(8) for each in file.read(rng.choice((1, 1, 40))))
            file.seek(-len(spoiled), os.SEEK_CUR)
            file.write(spoiled)
        try:
            kept = read(copy)
        except (ConfigError, GatewayError) as e:
            refusals.append(str(e))
        else:
            assert all(turns[name] == turn for name, turn in kept.items())
            whole += kept == turns
            least = min(least, len(kept))
        shutil.rmtree(copy)
    assert least >= len(turns) - 6 * 3  # a page holds calls of few sessions
    assert whole > 8  # free and unused bytes
    assert len(refusals) < 20  # the tables' own first pages, in so small a file
    assert all(FILE in each for each in refusals)


async def test_a_file_that_was_cut_is_refused_with_what_to_do(
    written: tuple[Path, Turns], engine: ScriptedEngine, start_gateway: Start
) -> None:
    store, _ = written
    os.truncate(store / FILE, (store / FILE).stat().st_size * 3 // 4 // 4096 * 4096)
    with pytest.raises(ConfigError, match=r"turns\.sqlite cannot be used: .*recover"):
        await start_gateway(engine, store_dir=str(store))


async def test_damage_in_the_write_ahead_log_costs_what_was_committed_after_it_and_nothing_else(
    written: tuple[Path, Turns], tmp_path: Path, engine: ScriptedEngine, start_gateway: Start
) -> None:
    """As a gateway leaves it that is killed: the log is not in the file yet, and some of its bytes are others."""
    store, before = written
    gateway = await start_gateway(engine, store_dir=str(store))
    session = await opened(gateway)
    for k in range(12):
        assert await ask(session, f"later {k}" + " y" * 400) == 200
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in (FILE, f"{FILE}-wal"):
        shutil.copyfile(store / name, killed / name)
    await gateway.stop()
    turns = read(killed)
    later = [name for name in turns if name not in before]
    assert len(later) == 12
    size, rng = (killed / f"{FILE}-wal").stat().st_size, random.Random(7)
    left = set()
    for k in range(40):
        copy = tmp_path / f"w{k}"
        shutil.copytree(killed, copy)
        with (copy / f"{FILE}-wal").open("r+b") as file:
            at = rng.randrange(size)
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        kept = read(copy)
        assert all(turns[name] == turn for name, turn in kept.items())
        assert before.keys() <= kept.keys()
        left.add(len(kept) - len(before))
        assert [name for name in later if name in kept] == later[: len(kept) - len(before)]
        if k == 0:
            again = await start_gateway(engine, store_dir=str(copy))
            assert again.recovered == len(kept)
            await again.stop()
        shutil.rmtree(copy)
    assert len(left) > 3


def can_recover() -> bool:
    """Whether SQLite's command line is here and built with what `.recover` needs (Debian's is not)."""
    line = ["sqlite3", ":memory:", "SELECT count(*) FROM sqlite_dbpage"]
    return shutil.which("sqlite3") is not None and not subprocess.run(line, capture_output=True).returncode


@pytest.mark.nightly
@pytest.mark.skipif(not can_recover(), reason="no sqlite3 command line here that can .recover")
async def test_the_documented_recovery_gives_a_store_that_can_be_read(
    written: tuple[Path, Turns], tmp_path: Path
) -> None:
    store, turns = written
    os.truncate(store / FILE, (store / FILE).stat().st_size * 3 // 4 // 4096 * 4096)
    (tmp_path / "new").mkdir()
    line = f"sqlite3 {store / FILE} .recover | sqlite3 {tmp_path / 'new' / FILE}"
    await asyncio.to_thread(subprocess.run, line, shell=True, check=True, timeout=60)
    kept = read(tmp_path / "new")
    assert 20 < len(kept) < 54
    assert all(turns[name] == turn for name, turn in kept.items())


async def test_a_store_in_a_folder_that_may_not_be_written_can_be_read(written: tuple[Path, Turns]) -> None:
    store, turns = written
    assert [p.name for p in sorted(store.iterdir())] == ["lock", FILE]
    store.chmod(0o500)
    (store / FILE).chmod(0o400)
    try:
        assert read(store) == turns
    finally:
        store.chmod(0o700)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no database", r"turns\.sqlite cannot be used: file is not a database"),
        ("another database", r"turns\.sqlite is no gateway's store of this version"),
        ("newer", rf"is no gateway's store of this version \(format {FORMAT}\); give another"),
    ],
)
async def test_what_is_no_store_is_refused_by_name(
    engine: ScriptedEngine, start_gateway: Start, tmp_path: Path, what: str, why: str
) -> None:
    if what == "no database":
        (tmp_path / FILE).write_bytes(b"turns\n" * 2000)
    else:
        database = sqlite3.connect(tmp_path / FILE)
        if what == "newer":
            database.executescript(f"{TABLES} UPDATE meta SET value = {FORMAT + 1} WHERE name = 'format'")
        else:
            database.execute("CREATE TABLE other(x)")
        database.commit()
        database.close()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=why):
        await start_gateway(engine, store_dir=str(tmp_path))
    assert contents(tmp_path).items() >= before.items()
