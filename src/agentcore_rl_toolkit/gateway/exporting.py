"""A store's turns as rows of a file, for whoever wants to look at them with other tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, MissingExtraError
from .journal import Journal
from .records import decode, expand
from .sessions import Sessions

_ROWS_AT_ONCE = 1000


def rows(store: str | Path, *, sessions: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """One dict per turn, with the session's id and metadata, sessions in the order they were opened.

    Raises: ConfigError when there is no store there, or a gateway is using it.
    """
    base = Path(store)
    parts = sorted(base.glob("shard-*")) or [base]
    for part in parts:
        if not list(part.glob("calls-*.log")):
            raise ConfigError(f"{part} holds no calls; give the directory that was passed as --store")
        journal = Journal(part)
        try:
            table = Sessions(journal, secret=b"", limit=2**31)
            journal.recover(table.replay)
            for session in table.by_id.values():
                if sessions is not None and session.id not in sessions:
                    continue
                whole = expand([decode(p) for p in table.payloads(session)])
                for turn in whole.turns:
                    yield {
                        "session_id": session.id,
                        "metadata": session.settings.metadata,
                        "turn_id": turn.turn_id,
                        "index": turn.index,
                        "prompt_ids": turn.prompt_ids,
                        "completion_ids": turn.completion_ids,
                        "logprobs": turn.logprobs,
                        "finish_reason": turn.finish_reason,
                        "parse_status": turn.parse_status,
                        "trainable": turn.trainable,
                        "weight_version_first": turn.weight_version_first,
                        "weight_version_last": turn.weight_version_last,
                        "started_s": turn.started_s,
                        "finished_s": turn.finished_s,
                    }
        finally:
            journal.close()


def export(store: str | Path, target: str | Path, *, sessions: Sequence[str] | None = None) -> tuple[int, int]:
    """Write all turns to a ``.jsonl`` or ``.parquet`` file. Returns the numbers of turns and sessions.

    Both load with Hugging Face's ``datasets`` (``load_dataset("json", ...)``, ``load_dataset("parquet", ...)``).
    Raises: ConfigError on another ending, MissingExtraError when pyarrow is needed and absent.
    """
    path = Path(target)
    if path.suffix == ".jsonl":
        return _jsonl(rows(store, sessions=sessions), path)
    if path.suffix == ".parquet":
        return _parquet(rows(store, sessions=sessions), path)
    raise ConfigError(f"{path.name} must end in .jsonl or .parquet")


def _jsonl(found: Iterator[dict[str, Any]], path: Path) -> tuple[int, int]:
    turns, names = 0, set()
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for row in found:
            file.write(encode(row) + b"\n")
            turns += 1
            names.add(row["session_id"])
    return turns, len(names)


def _parquet(found: Iterator[dict[str, Any]], path: Path) -> tuple[int, int]:
    try:
        import pyarrow as pa  # type: ignore[import-not-found, import-untyped, unused-ignore]  # only this export needs it
        import pyarrow.parquet as pq  # type: ignore[import-not-found, import-untyped, unused-ignore]  # likewise
    except ImportError as e:
        raise MissingExtraError("writing Parquet needs pyarrow. Install it with:\n    pip install pyarrow") from e
    schema = pa.schema(
        [
            ("session_id", pa.string()),
            ("metadata", pa.string()),
            ("turn_id", pa.string()),
            ("index", pa.int32()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("completion_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("finish_reason", pa.string()),
            ("parse_status", pa.string()),
            ("trainable", pa.bool_()),
            ("weight_version_first", pa.int64()),
            ("weight_version_last", pa.int64()),
            ("started_s", pa.float64()),
            ("finished_s", pa.float64()),
        ]
    )
    turns, names = 0, set()
    batch: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, schema) as writer:
        for row in found:
            turns += 1
            names.add(row["session_id"])
            batch.append({**row, "metadata": msgspec.json.encode(row["metadata"]).decode()})
            if len(batch) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return turns, len(names)
