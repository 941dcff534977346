"""The turns of a store as rows, one session in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..trajectory import Turn
from .capture.record import decode, expand
from .sessions.settings import SessionSettings
from .store.reader import open_reader


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One session of a store."""

    session_id: str
    metadata: dict[str, Any]
    turns: list[Turn] = field(repr=False)

    @property
    def metadata_json(self) -> str:
        return msgspec.json.encode(self.metadata).decode()


def stored_sessions(store: str | Path, *, sessions: Sequence[str] | None = None) -> Iterator[Stored]:
    """The sessions of a store in the order they were opened, one in memory at a time; a gateway may be using it.

    Raises: ConfigError when there is no store there.
    """
    reader = open_reader(Path(store))
    try:
        found = reader.sessions() if sessions is None else filter(None, map(reader.named, sessions))
        for row in found:
            whole = expand([decode(payload) for payload in reader.readable(row.number)])
            settings = msgspec.json.decode(row.settings, type=SessionSettings)
            yield Stored(session_id=row.session_id, metadata=settings.metadata, turns=whole.turns)
    finally:
        reader.close()


def turn_rows(stored: Stored) -> Iterator[dict[str, Any]]:
    """One row per turn. ``metadata`` is JSON text: its shape is the caller's, a column's is one for all."""
    for turn in stored.turns:
        yield {
            "session_id": stored.session_id,
            "metadata": stored.metadata_json,
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


def turn_schema(pa: Any) -> Any:
    """The Parquet schema of `turn_rows`; ``pa`` is pyarrow."""
    return pa.schema(
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
