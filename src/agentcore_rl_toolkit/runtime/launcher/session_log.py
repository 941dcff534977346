"""Logs of sessions: reads them, bounds them, and removes the oldest of ended sessions."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

KEPT_LOGS, KEPT_BYTES = 2_000, 2**32
MAX_BYTES = 2**25  # limit of a log
KEPT_PART = MAX_BYTES // 4  # size of the beginning, and of the end, that are kept of a larger one
CUT = b"\n[The log became larger than %d MiB. The output that was here is removed.]\n" % (MAX_BYTES >> 20)


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


def shorten(*paths: Path) -> None:
    """Remove the middle of logs that are too large, and what is written at that moment. Their writers append. Blocks."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "r+b", buffering=0, opener=_open_no_link) as f:
            if f.seek(0, os.SEEK_END) > MAX_BYTES:
                f.seek(-KEPT_PART, os.SEEK_END)
                end, late = f.read(KEPT_PART), f.read(KEPT_PART)  # ``late`` was written during the first read
                f.truncate(KEPT_PART)
                os.writev(f.fileno(), [CUT, end, late])  # joining them would take milliseconds, in which output is lost


def _open_no_link(path: str, flags: int) -> int:
    """Open a log to append. Without a view, a session may have replaced it with a link to a file outside of its sandbox."""
    return os.open(path, flags | os.O_APPEND | os.O_NOFOLLOW)


class KeptLogs:
    """The logs of ended sessions. Beyond ``most`` logs or bytes, the oldest are removed, but never the last one."""

    def __init__(self, most: int = KEPT_LOGS, most_bytes: int = KEPT_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._logs: dict[Path, int] = {}  # sizes, oldest first

    def keep(self, path: Path) -> None:
        self._logs.pop(path, None)  # an earlier session may have had the same id
        with contextlib.suppress(OSError):
            self._logs[path] = path.stat().st_size
        while len(self._logs) > 1 and (len(self._logs) > self._most or sum(self._logs.values()) > self._most_bytes):
            oldest = next(iter(self._logs))
            del self._logs[oldest]
            with contextlib.suppress(OSError):
                oldest.unlink()
