"""The turns of a store as rows of a file, for other tools. One session is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, MissingExtraError
from ..trajectory import Turn
from .capture.record import decode, expand
from .sessions.settings import SessionSettings
from .store.reader import open_reader

_ROWS_AT_ONCE = 1000

# The columns of a turn, which are its attributes, by pyarrow's names of types; in a list, the type of a list's items.
_TURN: dict[str, str | list[str]] = {
    "turn_id": "string",
    "index": "int32",
    "prompt_ids": ["int32"],
    "completion_ids": ["int32"],
    "logprobs": ["float32"],
    "finish_reason": "string",
    "parse_status": "string",
    "trainable": "bool",
    "weight_version_first": "int64",
    "weight_version_last": "int64",
    "started_s": "float64",
    "finished_s": "float64",
}


@dataclass(frozen=True, kw_only=True)
class StoredSession:
    """One session of a store."""

    session_id: str
    metadata: dict[str, Any]
    turns: list[Turn] = field(repr=False)

    def rows(self, metadata: Any) -> Iterator[dict[str, Any]]:
        """One row per turn."""
        for turn in self.turns:
            about = {"session_id": self.session_id, "metadata": metadata}
            yield about | {name: getattr(turn, name) for name in _TURN}


def export(store: str | Path, target: str | Path, *, sessions: Sequence[str] | None = None) -> tuple[int, int]:
    """Write all turns to a ``.jsonl`` or ``.parquet`` file. Returns the numbers of turns and sessions.

    Both load with Hugging Face's ``datasets``: ``load_dataset("json", ...)``, ``load_dataset("parquet", ...)``.
    Raises: ConfigError on another ending, MissingExtraError when pyarrow is needed and absent.
    """
    path = Path(target)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path.name} must end in .jsonl or .parquet")
    found = stored_sessions(store, sessions=sessions)
    return _jsonl(found, path) if path.suffix == ".jsonl" else _parquet(found, path)


def stored_sessions(store: str | Path, *, sessions: Sequence[str] | None = None) -> Iterator[StoredSession]:
    """The sessions of a store in the order they were opened; a gateway may be using it.

    Raises: ConfigError when there is no store there.
    """
    reader = open_reader(Path(store))
    try:
        found = reader.sessions() if sessions is None else filter(None, map(reader.named, sessions))
        for row in found:
            whole = expand([decode(payload) for payload in reader.readable(row.number)])
            settings = msgspec.json.decode(row.settings, type=SessionSettings)
            yield StoredSession(session_id=row.session_id, metadata=settings.metadata, turns=whole.turns)
    finally:
        reader.close()


def _jsonl(found: Iterator[StoredSession], path: Path) -> tuple[int, int]:
    turns = sessions = 0
    encode = msgspec.json.Encoder().encode
    stored = next(found, None)  # before the file is made: the store may not be one
    with path.open("wb") as file:
        while stored is not None:
            sessions += bool(stored.turns)
            for row in stored.rows(stored.metadata):
                file.write(encode(row) + b"\n")
                turns += 1
            stored = next(found, None)
    return turns, sessions


def _parquet(found: Iterator[StoredSession], path: Path) -> tuple[int, int]:
    """``metadata`` is JSON text: its shape is the caller's, a column's is one for all."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise MissingExtraError("writing Parquet needs pyarrow. Install it with:\n    pip install pyarrow") from e

    def kind(name: str | list[str]) -> Any:
        return pa.list_(kind(name[0])) if isinstance(name, list) else pa.type_for_alias(name)

    columns: dict[str, str | list[str]] = {"session_id": "string", "metadata": "string", **_TURN}
    schema = pa.schema([(name, kind(each)) for name, each in columns.items()])
    turns = sessions = 0
    batch: list[dict[str, Any]] = []
    stored = next(found, None)
    with pq.ParquetWriter(path, schema) as writer:
        while stored is not None:
            sessions += bool(stored.turns)
            for row in stored.rows(msgspec.json.encode(stored.metadata).decode()):
                turns += 1
                batch.append(row)
                if len(batch) == _ROWS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                    batch = []
            stored = next(found, None)
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return turns, sessions
