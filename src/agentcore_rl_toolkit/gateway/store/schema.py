"""The store's file: one SQLite database, its tables, and how a call becomes a row and a row a call.

``sqlite3 DIR/turns.sqlite`` opens it. `turns` and `failures` are views for people and viewers, over `calls`, which has
one row per model call. Token ids are little-endian int32, logprobs little-endian float32. A prompt is stored as the
call that it goes on from (``extends``, with which choice, and how many tokens are taken from there) and the ids that
are new; message lists likewise.

Every row has a checksum over what it says: SQLite finds damage to its own structure, not to the values in it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError, GatewayError
from ..capture.record import VERSION, CallRecord, ChoiceRecord

FILE = "turns.sqlite"
FORMAT = 2
PAGE_BYTES = 4096

# `format` is a row and not `PRAGMA user_version`: it is still there in a file that was made anew from a damaged one.
TABLES = f"""
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO meta VALUES('format', {FORMAT}), ('what', 'store of a model gateway of AgentCore RL Toolkit');
CREATE TABLE sessions(
  number INTEGER PRIMARY KEY,        -- never given to another session
  session_id TEXT NOT NULL UNIQUE,
  created_s REAL NOT NULL,           -- unix seconds
  after_call INTEGER NOT NULL,       -- the last call of the store when it was opened
  closed_s REAL,
  closed_place INTEGER,              -- in the order of closing
  settings TEXT NOT NULL             -- JSON: what its calls are held to, and its metadata
);
CREATE TABLE calls(
  number INTEGER PRIMARY KEY,        -- in the order they were stored
  session INTEGER NOT NULL,
  call_id TEXT, idx INTEGER, status TEXT, dialect TEXT, model TEXT,
  started_s REAL, first_token_s REAL, finished_s REAL,
  weight_version_first INTEGER, weight_version_last INTEGER,
  http_status INTEGER, error_type TEXT, error TEXT,
  digest INTEGER, retry_of TEXT, reply_id TEXT, upstream TEXT, parent_turn TEXT, branch_reason TEXT,
  usage BLOB,
  request_of TEXT, request BLOB,     -- the request's fields but the messages: those of that call, or its own
  messages BLOB, prompt_ids BLOB,    -- what is new in them
  messages_extend TEXT, messages_length INTEGER,  -- the call whose messages come before, and how many bytes
  extends TEXT, extends_choice INTEGER, extends_length INTEGER,  -- the call whose tokens come before, how many
  choices INTEGER,                   -- how many there are: the first is here, the others are in `choices`
  choice INTEGER, completion_ids BLOB, logprobs BLOB, finish_reason TEXT, parse_status TEXT, message BLOB,
  routed_experts BLOB, agent_logprobs BLOB, stop_sequence TEXT, choice_version_first INTEGER, choice_version_last INTEGER,
  untrainable TEXT, weight_spans BLOB, -- why it must not be trained on; (first token, version) pairs, int32
  checksum INTEGER,                  -- CRC-32
  delivered INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX calls_of_session ON calls(session, idx, status, delivered);
CREATE TABLE choices(
  call INTEGER NOT NULL,
  place INTEGER NOT NULL,
  choice INTEGER, completion_ids BLOB, logprobs BLOB, finish_reason TEXT, parse_status TEXT, message BLOB,
  routed_experts BLOB, agent_logprobs BLOB, stop_sequence TEXT, choice_version_first INTEGER, choice_version_last INTEGER,
  untrainable TEXT, weight_spans BLOB, -- why it must not be trained on; (first token, version) pairs, int32
  PRIMARY KEY(call, place)
) WITHOUT ROWID;
CREATE TABLE deleted(session INTEGER PRIMARY KEY);   -- deleted sessions whose calls are still to be removed
CREATE TABLE versions(
  published INTEGER PRIMARY KEY,
  weight_version INTEGER,
  sampler TEXT,                      -- at Tinker: the weights that are sampled as this version
  published_s REAL NOT NULL
);
CREATE TABLE settings(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE VIEW turns AS
  SELECT s.session_id, c.call_id AS turn_id, c.idx, c.status, c.model, c.extends, c.extends_length, c.prompt_ids,
    c.completion_ids, c.logprobs, c.finish_reason, c.parse_status, CAST(c.message AS TEXT) AS message,
    CAST(c.messages AS TEXT) AS messages, c.weight_version_first, c.weight_version_last, c.started_s, c.finished_s,
    c.delivered, c.choices, c.number
  FROM calls c JOIN sessions s ON s.number = c.session WHERE c.status IN ('ok', 'untrainable');
CREATE VIEW failures AS
  SELECT s.session_id, c.call_id, c.idx, c.status, c.http_status, c.error_type, c.error, c.upstream, c.started_s,
    c.finished_s, c.number
  FROM calls c JOIN sessions s ON s.number = c.session WHERE c.status NOT IN ('ok', 'untrainable');
"""

_WHAT = 24  # columns of a call from `call_id` to `prompt_ids`
_CHOICE = 13  # columns of a choice
CALL_COLUMNS = 2 + _WHAT + 2 + 3 + 1 + _CHOICE + 2
INSERT_CALL = f"INSERT INTO calls VALUES({','.join('?' * CALL_COLUMNS)})"
INSERT_CHOICE = f"INSERT INTO choices VALUES({','.join('?' * (2 + _CHOICE))})"
PUT_SESSION = "INSERT OR REPLACE INTO sessions VALUES(?,?,?,?,?,?,?)"

_NO_CHOICE = (None,) * _CHOICE
_encode = msgspec.msgpack.Encoder().encode
_astuple = msgspec.structs.astuple
Row = Sequence[Any]

# What a value is bound as: itself. For types that it does not know by heart, sqlite3 looks for a method at each value
# otherwise, and raises and drops an AttributeError: a quarter of the time that a call's row takes.
sqlite3.register_adapter(bytes, bytes)
_same: dict[None, None] = {}
sqlite3.register_adapter(type(None), _same.get)


# -- opening


def create(directory: Path) -> None:
    """Make the store of a directory, unless it has one. Raises: ConfigError, sqlite3.Error."""
    path = directory / FILE
    if path.exists() and path.stat().st_size:
        return
    directory.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite gives its other files the same mode


def connect(path: Path | None, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection to a store's file; None: to a private one, which the system removes with the process.

    Raises: ConfigError when it is no store of this format, sqlite3.Error.
    """
    if path is None:
        database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=MEMORY")
    else:
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        alone = read_only and not os.access(path.parent, os.W_OK) and not path.with_name(FILE + "-wal").exists()
        database = sqlite3.connect(
            uri + ("&immutable=1" if alone else ""),
            uri=True,
            timeout=5.0,
            isolation_level=None,
            check_same_thread=False,
        )
    try:
        _prepare(database, path, read_only=read_only)
    except UnicodeDecodeError as e:  # sqlite3's word for a text in the schema that is damaged
        database.close()
        damaged = sqlite3.DatabaseError(f"its schema is no text: {e}")
        damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damaged from e
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path | None, *, read_only: bool) -> None:
    if read_only:
        _check_format(database, path)
        return
    if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        database.execute(f"PRAGMA page_size={PAGE_BYTES}")
        if path is not None:
            database.execute("PRAGMA journal_mode=WAL")
        database.executescript(f"BEGIN; {TABLES} COMMIT")
    _check_format(database, path)
    database.execute("PRAGMA secure_delete=OFF")
    database.execute("PRAGMA cache_size=-8192")  # KiB
    database.execute("PRAGMA wal_autocheckpoint=0")  # the writer's thread does it


def _check_format(database: sqlite3.Connection, path: Path | None) -> None:
    named = database.execute(
        "SELECT count(*) FROM sqlite_master WHERE name IN ('meta', 'sessions', 'calls')"
    ).fetchone()
    if named != (3,):
        raise ConfigError(f"{path} is a SQLite database, but no gateway's store; give another --store")
    row = database.execute("SELECT value FROM meta WHERE name = 'format'").fetchone()
    version = row[0] if row else None
    if isinstance(version, int) and version < FORMAT:
        raise ConfigError(f"{path} has format {version}, this version writes {FORMAT}; give another --store")
    if not isinstance(version, int) or version > FORMAT:
        raise ConfigError(
            f"{path} has format {version}, this version reads up to {FORMAT}; use the newer version of the toolkit that wrote it"
        )


def trouble(error: sqlite3.Error, path: Path | None) -> str:
    """What is wrong with a store, and what to do."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    kind = code & 0xFF
    if kind == sqlite3.SQLITE_NOTADB:
        return f"{path} is no SQLite database, or its first page is damaged; restore a copy, or give another --store"
    if kind == sqlite3.SQLITE_CORRUPT:
        return (
            f"{path} is damaged ({error}). What can be read comes out with `agentcore-rl gateway export`, or as a new store "
            f"with `sqlite3 {path} .recover | sqlite3 NEW/{FILE}`; give another --store to go on"
        )
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is locked by another program ({error}); end what holds it open for writing"
    return f"{path} cannot be used: {error}"


def os_error(error: sqlite3.Error, path: Path | None) -> OSError:
    """The same as the system's error, for whoever waits for a write."""
    kind = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    full = kind == sqlite3.SQLITE_FULL
    number = errno.ENOSPC if full else errno.EBUSY if kind == sqlite3.SQLITE_BUSY else errno.EIO
    return OSError(number, os.strerror(number) if full else trouble(error, path))


# -- rows


def call_row(number: int, session: int, record: CallRecord) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """A call as a row of `calls`, and its choices beyond the first as rows of `choices`."""
    payload = _encode(record)
    what = _astuple(record)
    messages, prompt, choices = record.messages_base, record.prompt_base, record.choices
    row = (
        number,
        session,
        *what[1 : 1 + _WHAT],
        messages.call_id,
        messages.length,
        prompt.call_id,
        prompt.choice,
        prompt.length,
        len(choices),
        *(_astuple(choices[0]) if choices else _NO_CHOICE),
        zlib.crc32(payload[:-1]),
        int(record.delivered),
    )
    if len(choices) < 2:
        return row, []
    return row, [(number, place, *_astuple(choice)) for place, choice in enumerate(choices[1:], 1)]


def payload_of(row: Row, more: Iterable[Row] = ()) -> bytes:
    """The record of a row, encoded as `capture.record.encode` does. Raises: GatewayError when the row is damaged."""
    at = 2 + _WHAT
    choices = [row[at + 6 : at + 6 + _CHOICE]] if row[at + 5] else []
    choices += [other[2:] for other in more]
    value = (
        VERSION,
        *row[2:at],
        (row[at], -1, row[at + 1]),
        row[at + 2 : at + 5],
        choices,
        bool(row[-1]),
    )
    payload = _encode(value)
    if zlib.crc32(payload[:-1]) != row[-2]:
        raise GatewayError(f"call {row[2]} is damaged in the store (row {row[0]} of calls)")
    return payload


assert len(ChoiceRecord.__struct_fields__) == _CHOICE
assert len(CallRecord.__struct_fields__) == 1 + _WHAT + 4
