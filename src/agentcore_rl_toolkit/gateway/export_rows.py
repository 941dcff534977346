"""The turns of a store as rows, one session in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


# What a row says of a turn: its attributes, by the name of their type in pyarrow; in a list, the type of a list's items.
Columns = Mapping[str, str | list[str]]
_SESSION: Columns = {"session_id": "string", "metadata": "string"}
TURN: Columns = {
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


def turn_rows(stored: Stored) -> Iterator[dict[str, Any]]:
    """One row per turn. ``metadata`` is JSON text: its shape is the caller's, a column's is one for all."""
    return (row_of(stored, turn, TURN) for turn in stored.turns)


def row_of(stored: Stored, found: Any, columns: Columns, **more: Any) -> dict[str, Any]:
    """What is found in a session, as a row."""
    about = {"session_id": stored.session_id, "metadata": stored.metadata_json, **more}
    return {**about, **{name: getattr(found, name) for name in columns if name not in more}}


def schema_of(pa: Any, columns: Columns) -> Any:
    """The Parquet schema of such rows; ``pa`` is pyarrow."""

    def kind(name: str | list[str]) -> Any:
        return pa.list_(kind(name[0])) if isinstance(name, list) else pa.type_for_alias(name)

    return pa.schema([(name, kind(each)) for name, each in {**_SESSION, **columns}.items()])
