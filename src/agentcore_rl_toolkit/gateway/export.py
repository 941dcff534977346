"""The turns of a store as lines of a file, for other tools. One session is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import ConfigError
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
    """Write all turns to a ``.jsonl`` file. Returns the numbers of turns and sessions.

    Hugging Face's ``datasets`` reads it, and writes other formats: ``load_dataset("json", data_files=...)``.
    Raises: ConfigError on another ending, or when there is no store.
    """
    path = Path(target)
    if path.suffix != ".jsonl":
        raise ConfigError(f"{path.name} must end in .jsonl")
    turns = counted = 0
    open_reader(Path(store)).close()  # before the file is made: the store may not be one
    with path.open("wb") as file:
        for session in stored_turns(store, sessions=sessions):
            counted += bool(session.turns)
            turns += len(session.turns)
            about = {"session_id": session.session_id, "metadata": session.metadata}
            for turn in session.turns:
                row = about | {name: getattr(turn, name) for name in (*_COLUMNS, *_WHEN)}
                file.write(msgspec.json.encode(row) + b"\n")
    return turns, counted


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
