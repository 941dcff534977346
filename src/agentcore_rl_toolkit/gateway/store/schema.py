"""The store's file: one SQLite database, its tables, and how a call becomes a row and a row a call.

`calls` has one row per model call: the columns that the store searches, and the encoded record (`capture.record`).
Every record has a checksum: SQLite finds damage to its own structure, not to the values.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import ConfigError, GatewayError

FILE = "turns.sqlite"
FORMAT = 6
PAGE_BYTES = 4096

# `format` is a row and not `PRAGMA user_version`: it survives `.recover`.
TABLES = f"""
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO meta VALUES('format', {FORMAT}), ('what', 'store of a model gateway of AgentCore RL Toolkit');
CREATE TABLE sessions(
  number INTEGER PRIMARY KEY,        -- never given to another session
  session_id TEXT NOT NULL UNIQUE,
  created_s REAL NOT NULL,           -- unix seconds
  closed_s REAL,
  settings TEXT NOT NULL             -- JSON: what its calls are held to, and its metadata
);
CREATE TABLE calls(
  number INTEGER PRIMARY KEY,        -- in the order they were stored
  session INTEGER NOT NULL,          -- the calls of a deleted session are removed later
  idx INTEGER NOT NULL,
  status TEXT NOT NULL,
  digest INTEGER NOT NULL,           -- of the request
  call_id TEXT NOT NULL,
  delivered INTEGER NOT NULL,        -- whether an agent has the whole reply
  record BLOB NOT NULL,              -- its own "delivered" is that of the start
  checksum INTEGER NOT NULL          -- CRC-32 of the record without its last byte, "delivered"
);
CREATE INDEX calls_of_session ON calls(session, idx, status, delivered);
CREATE TABLE settings(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

INSERT_CALL = "INSERT INTO calls VALUES(?,?,?,?,?,?,?,?,?)"
SELECT_CALL = "SELECT number, call_id, delivered, record, checksum FROM calls"
PUT_SESSION = "INSERT OR REPLACE INTO sessions VALUES(?,?,?,?,?)"
DELETE_SESSION = "DELETE FROM sessions WHERE number = ?"

Row = Sequence[Any]
_TRUE, _FALSE = b"\xc3", b"\xc2"  # msgpack's values; the last member of a record is "delivered"


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection to a store's file. Raises: ConfigError when it is no store of this format, sqlite3.Error."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    database = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        if not read_only:
            if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                database.execute(f"PRAGMA page_size={PAGE_BYTES}")
                database.execute("PRAGMA journal_mode=WAL")
                database.executescript(f"BEGIN; {TABLES} COMMIT")
            database.execute("PRAGMA secure_delete=OFF")
            database.execute("PRAGMA cache_size=-8192")  # KiB
            database.execute("PRAGMA wal_autocheckpoint=0")  # the writer's thread does it
        with suppress(sqlite3.OperationalError):  # another program's database has no such table
            if database.execute("SELECT value FROM meta WHERE name = 'format'").fetchone() == (FORMAT,):
                return database
        raise ConfigError(f"{path} is no gateway's store of this version (format {FORMAT}); give another --store")
    except BaseException:
        database.close()
        raise


def trouble(error: sqlite3.Error, path: Path) -> str:
    """Describe the fault of a store, and the way out if its file is damaged."""
    way = f". What can be read becomes a new store with `sqlite3 {path} .recover | sqlite3 NEW/{FILE}`"
    damaged = not isinstance(error, sqlite3.OperationalError)  # which is a lock or the disk
    return f"the store {path} cannot be used: {error}{way if damaged else ''}"


def payload_of(row: Row) -> bytes:
    """Return the record of a row (`SELECT_CALL`) in the form of `capture.record.encode`. Raises: GatewayError."""
    number, call_id, delivered, payload, checksum = row
    if not isinstance(payload, bytes) or zlib.crc32(memoryview(payload)[:-1]) != checksum:
        raise GatewayError(f"call {call_id} is damaged in the store (row {number} of calls)")
    return b"".join((memoryview(payload)[:-1], _TRUE if delivered else _FALSE))
