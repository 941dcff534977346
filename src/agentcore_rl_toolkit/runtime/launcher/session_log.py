"""Logs of sessions: reading them, and how many of ended sessions are kept."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

KEPT_LOG_BYTES = 2 * 2**30  # of ended sessions together


def read_log(path: str | os.PathLike[str], offset: int, size: int) -> bytes:
    """A piece of a log from an offset on (negative: from its end); empty when there is none."""
    try:
        with open(path, "rb") as f:
            end = f.seek(0, os.SEEK_END)
            f.seek(max(0, end + offset) if offset < 0 else min(offset, end))
            return f.read(size)
    except OSError:
        return b""


def log_tail(path: str | os.PathLike[str], size: int = 2_000) -> str:
    """The end of a log; empty when there is none."""
    return read_log(path, -size, size).decode(errors="replace").strip()


def log_bytes(path: str | os.PathLike[str]) -> int:
    """What a log takes; 0 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class KeptLogs:
    """The logs of ended sessions, oldest first; beyond ``most`` of them, or 2 GiB together, the oldest go."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._logs: deque[tuple[Path, int]] = deque()
        self._bytes = 0

    def keep(self, path: Path, size: int) -> None:
        self._logs.append((path, size))
        self._bytes += size
        while len(self._logs) > self._most or (self._bytes > KEPT_LOG_BYTES and len(self._logs) > 1):
            oldest, its_size = self._logs.popleft()
            self._bytes -= its_size
            with contextlib.suppress(OSError):
                oldest.unlink(missing_ok=True)

    def find_old(self) -> None:
        """Keep those of earlier runs. Blocks."""
        found: list[tuple[float, Path, int]] = []
        for path in self._folder.glob("*/*.log"):
            with contextlib.suppress(OSError):
                info = path.stat()
                found.append((info.st_mtime, path, info.st_size))
        for _, path, size in sorted(found):
            self.keep(path, size)
