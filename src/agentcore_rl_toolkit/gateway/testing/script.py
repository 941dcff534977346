"""The faults that a test gives to a scripted engine, and the requests that the engine saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one call.

    ``status`` answers with an error body; ``drop_after`` cuts the connection after so many body bytes (0: before the
    head); ``body`` replaces the answer's body; ``delay_s`` waits first, ``gate`` until it is set; ``edit`` changes the reply (or
    each chunk).
    """

    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    drop_after: int | None = None
    delay_s: float = 0.0
    gate: asyncio.Event | None = None
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None


@dataclass
class Seen:
    """One request as the engine saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False


def error_body(status: int, message: str = "scripted failure") -> bytes:
    error = {"message": f"{message} {status}", "type": "X", "param": None, "code": status}
    return json.dumps({"error": error}).encode()
