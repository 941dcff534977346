"""The turns of a store as lines of a file, for other tools. One session is in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, MissingExtraError
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


def export(store: str | Path, target: str | Path, *, sessions: Sequence[str] | None = None) -> tuple[int, int]:
    """Write all turns, in the order their sessions were opened, to a ``.jsonl`` or ``.parquet`` file; a gateway may be using the
    store. Returns the numbers of turns and sessions.

    Both load with Hugging Face's ``datasets``: ``load_dataset("json", data_files=...)``, ``load_dataset("parquet", ...)``.
    Raises: ConfigError on another ending, or when there is no store; MissingExtraError when pyarrow is needed and absent.
    """
    path = Path(target)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path.name} must end in .jsonl or .parquet")
    counted: list[int] = []
    with (
        contextlib.closing(open_reader(Path(store))) as reader,
        _jsonl(path) if path.suffix == ".jsonl" else _parquet(path) as write,
    ):
        for row in reader.sessions() if sessions is None else filter(None, map(reader.named, sessions)):
            turns = expand([decode(payload) for payload in reader.readable(row.number)]).turns
            settings = msgspec.json.decode(row.settings, type=SessionSettings)
            about = {"session_id": row.session_id, "metadata": settings.metadata}
            write([about | {name: getattr(turn, name) for name in (*_COLUMNS, *_WHEN)} for turn in turns])
            counted.append(len(turns))
    return sum(counted), sum(map(bool, counted))


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
