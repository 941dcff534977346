"""The turns of a store as lines of a file, for other tools. One session is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError, MissingExtraError
from ..trajectory import Turn
from .capture.record import decode, expand
from .sessions.settings import SessionSettings
from .store.reader import open_reader

# Attributes of a turn.
_COLUMNS = (
    "turn_id",
    "index",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "finish_reason",
    "parse_status",
    "trainable",
    "tools",
    "tag",
)
_WHEN = ("weight_version_first", "weight_version_last", "started_s", "finished_s")


class StoredTurns(NamedTuple):
    """One session of a store."""

    session_id: str
    metadata: dict[str, Any]
    turns: list[Turn]


def export(store: str | Path, target: str | Path, *, sessions: Sequence[str] | None = None) -> tuple[int, int]:
    """Write all turns to a ``.jsonl`` or ``.parquet`` file. Returns the numbers of turns and sessions.

    Both load with Hugging Face's ``datasets``: ``load_dataset("json", data_files=...)``, ``load_dataset("parquet", ...)``.
    Raises: ConfigError on another ending, or when there is no store; MissingExtraError when pyarrow is needed and absent.
    """
    path = Path(target)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path.name} must end in .jsonl or .parquet")
    turns = counted = 0
    open_reader(Path(store)).close()  # before the file is made: the store may not be one
    with _jsonl(path) if path.suffix == ".jsonl" else _parquet(path) as write:
        for session in stored_turns(store, sessions=sessions):
            counted += bool(session.turns)
            turns += len(session.turns)
            about = {"session_id": session.session_id, "metadata": session.metadata}
            write([about | {name: getattr(turn, name) for name in (*_COLUMNS, *_WHEN)} for turn in session.turns])
    return turns, counted


Write = Callable[[list[dict[str, Any]]], None]


@contextlib.contextmanager
def _jsonl(path: Path) -> Iterator[Write]:
    with path.open("wb") as file:
        yield lambda rows: file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    """``metadata`` is JSON text there: its shape is the caller's, a column's is one for all."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise MissingExtraError("writing Parquet needs pyarrow. Install it with:\n    pip install pyarrow") from e
    kinds = {"index": pa.int32(), "trainable": pa.bool_(), "logprobs": pa.list_(pa.float32())}
    kinds |= {name: pa.list_(pa.int32()) for name in ("prompt_ids", "completion_ids")} | {
        "tools": pa.list_(pa.string())
    }
    kinds |= {name: pa.int64() if "version" in name else pa.float64() for name in _WHEN}
    names = ("session_id", "metadata", *_COLUMNS, *_WHEN)
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in names])
    with pq.ParquetWriter(path, schema) as writer:

        def write(rows: list[dict[str, Any]]) -> None:
            plain = [row | {"metadata": msgspec.json.encode(row["metadata"]).decode()} for row in rows]
            writer.write_table(pa.Table.from_pylist(plain, schema=schema))

        yield write


def stored_turns(store: str | Path, *, sessions: Sequence[str] | None = None) -> Iterator[StoredTurns]:
    """The sessions of a store in the order they were opened; a gateway may be using it.

    Raises: ConfigError when there is no store there.
    """
    reader = open_reader(Path(store))
    try:
        found = reader.sessions() if sessions is None else filter(None, map(reader.named, sessions))
        for row in found:
            whole = expand([decode(payload) for payload in reader.readable(row.number)])
            settings = msgspec.json.decode(row.settings, type=SessionSettings)
            yield StoredTurns(row.session_id, settings.metadata, whole.turns)
    finally:
        reader.close()
