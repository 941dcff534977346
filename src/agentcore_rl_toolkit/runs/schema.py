"""The tables of `rollouts.sqlite`, and how the file is opened."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from ..errors import ConfigError

VERSION = 3
_ROLLOUT = """session_id TEXT NOT NULL UNIQUE, phase TEXT NOT NULL, step INTEGER, grp TEXT NOT NULL, input_key TEXT,
    input TEXT, place INTEGER NOT NULL, attempt INTEGER, outcome TEXT NOT NULL, cause TEXT, failure TEXT, mask_reason TEXT,
    stage TEXT, reward REAL, score REAL, advantage REAL, staleness INTEGER, weight_min INTEGER, weight_max INTEGER, turns INTEGER,
    sampled_tokens INTEGER, trained_tokens INTEGER, gradient_tokens INTEGER, sequence_tokens INTEGER, branches INTEGER,
    elapsed_s REAL, ended_s REAL, error TEXT, stop TEXT, cut_calls INTEGER, unparsed_calls INTEGER, logprob_min REAL,
    logprob_mean REAL, gap_max REAL, gap_mean REAL, entropy_mean REAL, tool_calls INTEGER, tools JSON, numbers JSON"""
COLUMNS: dict[str, str] = dict(column.split(maxsplit=1) for column in _ROLLOUT.split(","))
# The index of texts holds no text, so a document is never deleted from it: `searched` is what counts. Three characters are the
# unit, so that any part of a word is found, in languages without spaces too.
_TABLES = f"""
CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollouts (id INTEGER PRIMARY KEY, {_ROLLOUT});
CREATE INDEX IF NOT EXISTS by_step ON rollouts (phase, step, grp, place);
CREATE INDEX IF NOT EXISTS by_input ON rollouts (input_key, phase, step, score);
CREATE TABLE IF NOT EXISTS steps (phase TEXT NOT NULL, step INTEGER, summary TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS steps_of ON steps (phase, step);
CREATE TABLE IF NOT EXISTS searched (document INTEGER PRIMARY KEY AUTOINCREMENT, rollout INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS searched_of ON searched (rollout);
CREATE TABLE IF NOT EXISTS parts (id INTEGER PRIMARY KEY, rollout INTEGER NOT NULL, name TEXT NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS parts_of ON parts (rollout, name);
CREATE TABLE IF NOT EXISTS token_texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS search USING fts5(text, content='', tokenize='trigram');
CREATE VIRTUAL TABLE IF NOT EXISTS search_terms USING fts5vocab(search, row)
"""
# What differs in equal errors: ids, addresses, measured times. Status codes and other short numbers stay.
_OWN = re.compile(r"(?=[\w-]*\d)[\w-]{10,}|\d+\.\d+")
_PATIENCE_S = 20.0  # processes of one trainer may write to the same run


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open the file to write. Raises: ConfigError when another version wrote it; sqlite3.Error, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last second, never the file
        database.execute("BEGIN IMMEDIATE")
        found = database.execute("PRAGMA user_version").fetchone()[0]
        if found:
            _check(path, found)
        for statement in _TABLES.split(";"):  # `executescript` would commit
            database.execute(statement)
        database.execute(f"PRAGMA user_version={VERSION}")
        database.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database


def _check(path: Path, found: int) -> None:
    if not found:
        raise ConfigError(f"{path} is empty: its writer ended before the first rollout")
    if found != VERSION:
        what = "update the toolkit" if found > VERSION else "the run is from an earlier version, so run it again"
        raise ConfigError(f"{path} has format {found}, this version has {VERSION}: {what}")


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open the file to read, also while it is written. Raises: ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}: it is a run of `sft`, which has no rollouts, or no run")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    database = sqlite3.connect(uri, uri=True, timeout=5.0, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.create_function("SHAPE", 1, shape_of, deterministic=True)
    try:
        _check(path, database.execute("PRAGMA user_version").fetchone()[0])
    except (sqlite3.Error, ConfigError) as e:
        database.close()
        raise ConfigError(f"{path} cannot be read: {e}") from e
    return database


def shape_of(error: str | None) -> str | None:
    """Return an error with `#` for what is different in each rollout, by which equal errors are counted together."""
    return None if error is None else _OWN.sub("#", error)
