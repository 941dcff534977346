"""Logs of sessions: reads them, and removes the oldest of ended sessions."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import Path

KEPT_LOGS = 2_000


def read_log(path: str | os.PathLike[str], offset: int, size: int) -> bytes:
    """Read a piece of a log from an offset on (negative: from its end). A missing log is empty."""
    try:
        with open(path, "rb") as f:
            end = f.seek(0, os.SEEK_END)
            f.seek(max(0, end + offset) if offset < 0 else min(offset, end))
            return f.read(size)
    except OSError:
        return b""


def log_tail(path: str | os.PathLike[str], size: int = 2_000) -> str:
    """Read the end of a log. A missing log is empty."""
    return read_log(path, -size, size).decode(errors="replace").strip()


class KeptLogs:
    """The logs of ended sessions, oldest first. Beyond ``most`` of them the oldest go."""

    def __init__(self, most: int = KEPT_LOGS) -> None:
        self._most = most
        self._logs: OrderedDict[Path, None] = OrderedDict()

    def keep(self, path: Path) -> None:
        self._logs[path] = None
        self._logs.move_to_end(path)  # an earlier session may have had the same id
        if len(self._logs) > self._most:
            with contextlib.suppress(OSError):
                self._logs.popitem(last=False)[0].unlink()
