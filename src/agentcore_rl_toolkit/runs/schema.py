"""The tables of `rollouts.sqlite`, and how the file is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ..errors import ConfigError

VERSION = 1
COLUMNS: dict[str, str] = {
    "session_id": "TEXT NOT NULL UNIQUE",
    "phase": "TEXT NOT NULL",
    "step": "INTEGER",
    "grp": "TEXT NOT NULL",
    "input_key": "TEXT",
    "place": "INTEGER NOT NULL",
    "attempt": "INTEGER",
    "outcome": "TEXT NOT NULL",
    "cause": "TEXT",
    "failure": "TEXT",
    "mask_reason": "TEXT",
    "stage": "TEXT",
    "reward": "REAL",
    "score": "REAL",
    "advantage": "REAL",
    "staleness": "INTEGER",
    "weight_min": "INTEGER",
    "weight_max": "INTEGER",
    "turns": "INTEGER",
    "sampled_tokens": "INTEGER",
    "trained_tokens": "INTEGER",
    "sequence_tokens": "INTEGER",
    "branches": "INTEGER",
    "elapsed_s": "REAL",
    "ended_s": "REAL",
    "error": "TEXT",
    "logprob_min": "REAL",
    "logprob_mean": "REAL",
    "gap_max": "REAL",
    "gap_mean": "REAL",
    "entropy_mean": "REAL",
    "tool_calls": "INTEGER",
    "bytes": "INTEGER NOT NULL DEFAULT 0",
    "dropped": "TEXT",
}
_TABLES = f"""
CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollouts (id INTEGER PRIMARY KEY, {", ".join(f"{n} {t}" for n, t in COLUMNS.items())});
CREATE INDEX IF NOT EXISTS by_step ON rollouts (phase, step, grp, place);
CREATE INDEX IF NOT EXISTS by_input ON rollouts (input_key, phase, step);
CREATE TABLE IF NOT EXISTS tools (rollout INTEGER NOT NULL, name TEXT NOT NULL, calls INTEGER NOT NULL,
    PRIMARY KEY (name, rollout)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tools_of ON tools (rollout);
CREATE TABLE IF NOT EXISTS texts (rollout INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parts (id INTEGER PRIMARY KEY, rollout INTEGER NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS parts_of ON parts (rollout, name);
CREATE TABLE IF NOT EXISTS token_texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
"""
_PATIENCE_S = 20.0  # processes of one trainer may write to the same run


def open_to_write(path: Path) -> sqlite3.Connection:
    """Raises: ConfigError when a newer version wrote it; sqlite3.Error, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last second, never the file
        database.execute("BEGIN IMMEDIATE")
        found = database.execute("PRAGMA user_version").fetchone()[0]
        if found > VERSION:
            raise ConfigError(f"{path} has format {found}, this version writes {VERSION}: update the toolkit")
        for statement in _TABLES.split(";"):
            if statement.strip():
                database.execute(statement)
        database.execute(f"PRAGMA user_version={VERSION}")
        database.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database


def open_to_read(path: Path) -> sqlite3.Connection:
    """Works beside a writer, and on folders that cannot be written. Raises: ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}: it is no run, or one of an older version")
    error: sqlite3.Error | None = None
    for options in ("mode=ro", "mode=ro&immutable=1"):
        database = sqlite3.connect(
            f"{path.absolute().as_uri()}?{options}", uri=True, timeout=5.0, check_same_thread=False
        )
        database.row_factory = sqlite3.Row
        try:
            found = database.execute("PRAGMA user_version").fetchone()[0]
            database.execute("SELECT 1 FROM rollouts LIMIT 1").fetchone()
        except sqlite3.Error as e:
            database.close()
            error = e
            continue
        if found > VERSION:
            database.close()
            raise ConfigError(f"{path} has format {found}, this version reads {VERSION}: update the toolkit")
        return database
    raise ConfigError(f"{path} cannot be read: {error}") from error
