"""What happens to stores: damage, and disks that refuse."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agentcore_rl_toolkit.gateway import Gateway
from agentcore_rl_toolkit.gateway.store.schema import FILE


@contextmanager
def refused(gateway: Gateway) -> Iterator[None]:
    """The store takes nothing: SQLite itself refuses every write."""
    gateway.store._database.execute("PRAGMA query_only=ON")
    try:
        yield
    finally:
        gateway.store._database.execute("PRAGMA query_only=OFF")


@contextmanager
def locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another program has the store's file: commits wait."""
    monkeypatch.setattr("agentcore_rl_toolkit.gateway.store.writer._LOCKED_S", 60.0)
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def killed(gateway: Gateway, folder: Path) -> str:
    """Copy the store as it would be if the gateway were killed now. Returns the copy's folder."""
    shutil.copytree(gateway.store.path.parent, folder)
    return str(folder)


def calls_of(database: sqlite3.Connection, session_id: str) -> list[int]:
    """The numbers of a session's stored calls, in their order."""
    found = database.execute(
        "SELECT number FROM calls WHERE session = (SELECT number FROM sessions WHERE session_id = ?) ORDER BY number",
        (session_id,),
    )
    return [number for (number,) in found]


def flip(database: sqlite3.Connection, number: int) -> None:
    """Flip a bit in what is stored of a call."""
    [value] = database.execute("SELECT record FROM calls WHERE number = ?", (number,)).fetchone()
    middle = len(value) // 2
    spoiled = value[:middle] + bytes([value[middle] ^ 0x10]) + value[middle + 1 :]
    database.execute("UPDATE calls SET record = ? WHERE number = ?", (spoiled, number))


def spoil(where: Gateway | Path, session_id: str, place: int) -> None:
    """Damage a session's call, in a store that is served or lies in this folder."""
    if isinstance(where, Gateway):
        database = where.store._database
        flip(database, calls_of(database, session_id)[place])
        return
    database = sqlite3.connect(where / FILE)
    flip(database, calls_of(database, session_id)[place])
    database.commit()
    database.close()
