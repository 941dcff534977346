"""A store's turns as rows of a file, for whoever wants to look at them with other tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, MissingExtraError
from .export_rows import TURN, Stored, schema_of, stored_sessions, turn_rows

_ROWS_AT_ONCE = 1000


FORMATS = ("jsonl", "parquet", "hf")


def export(
    store: str | Path, target: str | Path, *, sessions: Sequence[str] | None = None, format: str | None = None
) -> tuple[int, int]:
    """Write all turns to a ``.jsonl`` or ``.parquet`` file, or a data set folder (``hf``, see `export_dataset`).

    ``format`` None goes by the target's ending. Returns the numbers of turns and sessions. All three load with Hugging
    Face's ``datasets`` (``load_dataset("json", ...)``, ``load_dataset("parquet", ...)``, ``load_dataset(FOLDER)``).
    Raises: ConfigError on another ending or format, MissingExtraError when pyarrow is needed and absent.
    """
    path = Path(target)
    wanted = format if format is not None else path.suffix.removeprefix(".")
    if wanted == "hf":
        from .export_dataset import export_folder

        return export_folder(store, path, sessions=sessions)
    if wanted not in FORMATS:
        raise ConfigError(f"{path.name} must end in .jsonl or .parquet, or --format must say what it is to be")
    found = stored_sessions(store, sessions=sessions)
    return _jsonl(found, path) if wanted == "jsonl" else _parquet(found, path)


def _jsonl(found: Iterator[Stored], path: Path) -> tuple[int, int]:
    turns = names = 0
    encode = msgspec.json.Encoder().encode
    first = next(found, None)  # before the file is made: the store may not be one
    with path.open("wb") as file:
        while first is not None:
            names += bool(first.turns)
            for row in turn_rows(first):
                file.write(encode({**row, "metadata": first.metadata}) + b"\n")
                turns += 1
            first = next(found, None)
    return turns, names


def _parquet(found: Iterator[Stored], path: Path) -> tuple[int, int]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise MissingExtraError("writing Parquet needs pyarrow. Install it with:\n    pip install pyarrow") from e
    schema = schema_of(pa, TURN)
    turns = names = 0
    batch: list[dict[str, Any]] = []
    stored = next(found, None)
    with pq.ParquetWriter(path, schema) as writer:
        while stored is not None:
            names += bool(stored.turns)
            for row in turn_rows(stored):
                turns += 1
                batch.append(row)
                if len(batch) == _ROWS_AT_ONCE:
                    writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                    batch = []
            stored = next(found, None)
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return turns, names
