"""Data sets: rows of JSONL, JSON or Parquet files, each row being the payload that the agent receives."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..contract import ROLLOUT_FIELD
from ..errors import ConfigError, MissingExtraError

MAX_ID = 99  # longest id that stays unchanged, in characters. Backends add a few, and a key takes 200.
_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_ID}}}")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the payloads of a file, as `numbered_rows` does."""
    return [payload for _, payload in numbered_rows(Path(path))]


def numbered_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read the payloads of a ``.jsonl``, ``.json`` (a list) or ``.parquet`` file, in order, by the number of line or row.

    Every field of a row is the payload, no envelope. Rows of the form ``{"prompt": ..., "metadata": {...}}``, as
    slime reads them, are accepted too: there the metadata is the payload, and `prompt` and `label` are added to it
    where it has none.
    Raises: ConfigError naming file and number when a row is not an object or carries `_rollout`; MissingExtraError for
    Parquet without pyarrow.
    """
    if not path.is_file():
        raise ConfigError(f"there is no data file {path}")
    found: list[tuple[int, dict[str, Any]]] = []
    for number, row in _raw_rows(path):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{path}:{number}: a row must be an object, got {type(row).__name__}")
        payload = unwrap(row)
        if ROLLOUT_FIELD in payload:
            raise ConfigError(f"{path}:{number}: `{ROLLOUT_FIELD}` is written by the client; remove it from the data")
        try:
            encode_payload(payload)
        except ConfigError as e:  # Parquet has dates, decimals and bytes, and Python's JSON reader takes NaN
            raise ConfigError(f"{path}:{number}: {e}; write it as text or a number") from e
        found.append((number, payload))
    if not found:
        raise ConfigError(f"{path} has no rows")
    return found


def unwrap(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payload of a row.

    The payload is the row, or the metadata of slime's ``{"prompt", "metadata"}`` form. Metadata without `prompt` or
    `label` get those of the row.
    """
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping) and set(row) <= {"prompt", "metadata", "label"}:
        return {**{k: row[k] for k in ("prompt", "label") if k in row}, **metadata}
    return dict(row)


def payload_id(payload: Mapping[str, Any]) -> str:
    """Return an input id for a payload: its ``id`` or ``idx`` if a key can hold it, otherwise a digest of its content."""
    for name in ("id", "idx"):
        value = payload.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MAX_ID:
            return str(value)
        if isinstance(value, str) and _ID.fullmatch(value):
            return value
    return hashlib.sha256(encode_payload(payload).encode()).hexdigest()[:20]


def encode_payload(payload: Mapping[str, Any]) -> str:
    """Encode a payload as one canonical line of JSON. Equal payloads give equal text. Raises: ConfigError when it is not JSON."""
    try:
        return json.dumps(payload, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as e:
        raise ConfigError(f"a payload must be plain JSON: {e}") from e


def _raw_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), 1)
        return
    if path.suffix not in (".jsonl", ".ndjson", ".json"):
        raise ConfigError(f"{path}: data files are .jsonl, .json or .parquet")
    text, number = read_text(path), 1
    try:
        if path.suffix == ".json":
            rows = json.loads(text)
            yield from enumerate(rows if isinstance(rows, list) else [rows], 1)
            return
        # Not splitlines(): JSON text may hold U+2028, U+0085 and others that Python takes for ends of lines.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, json.loads(line)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{path}:{number}: {e}") from e


def read_text(path: Path) -> str:
    """Read a text file, without its byte order mark. Raises: ConfigError when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text ({e.reason} at byte {e.start}); save it as UTF-8") from e


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as e:
        raise MissingExtraError("reading .parquet files needs pyarrow:\n    pip install pyarrow") from e
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as e:
        raise ConfigError(f"{path} cannot be read as Parquet: {e}") from e
