"""Which `file://` stores sessions can write to: a rollout that names another one is refused before it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...contract import ROLLOUT_FIELD
from ...errors import AgentCoreRLError
from ...store import parse_url

ASKS_FOR_A_RECORD = f'"{ROLLOUT_FIELD}"'.encode()


def store_folder(text: str) -> Path | None:
    """The folder of a ``file://`` store, or a plain path; None for a store elsewhere. Raises: ConfigError on what is neither."""
    if "://" not in text:
        return Path(text).resolve()
    url = parse_url(text)
    return Path(url.prefix) if url.scheme == "file" else None


def refused_store(payload: Sequence[bytes], writable: Iterable[Path]) -> str | None:
    """Why the record that a payload asks for cannot be written by its session; None when it can, or asks for none."""
    body = b"".join(payload)
    if ASKS_FOR_A_RECORD not in body:
        return None
    try:
        bucket = json.loads(body)[ROLLOUT_FIELD]["s3_bucket"]
        url = parse_url(bucket)
    except (AgentCoreRLError, ValueError, TypeError, LookupError, RecursionError):
        return None  # the agent says what is wrong with it
    real = Path(os.path.realpath(url.prefix))
    if url.scheme != "file" or any(real.is_relative_to(os.path.realpath(folder)) for folder in writable):
        return None
    return (
        f"The sandbox of this runtime's sessions has no store {url}: start the runtime with --store {url}"
        f" (or --writable {url.prefix}), or name the store that it was started with."
    )
