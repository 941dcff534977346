"""A session's log: read without being led elsewhere, and kept to a size. Standard library only, Python 3.10.

Its folder can be written by the agent's module code, which may put anything there under the log's name: a pipe, a link. And its
writer is the session itself, which has the file open for appending and never lets go of it, so a log that grew too large is
shortened in place: its end is kept, what was before is cut out.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

from .trees import open_file

KEPT_LOG_BYTES = 2 * 2**30  # of ended sessions together
LOG_BYTES = 64 * 2**20  # a busy agent writes a megabyte in an hour
_KEPT_SHARE = 4  # one part in so many stays when a log is cut
_LOOKS = 8  # for what the session writes while its log is cut; a session that never pauses loses lines here
_CUT = "[{} bytes of this log were cut out: a session's log is kept to {} bytes]\n"


def read_log(path: str | os.PathLike[str], offset: int, size: int) -> bytes:
    """A piece of a log from an offset on (negative: from its end); empty when there is none."""
    try:
        fd = open_file(path)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as f:
        end = f.seek(0, os.SEEK_END)
        f.seek(max(0, end + offset) if offset < 0 else min(offset, end))
        return f.read(size)


def log_tail(path: str | os.PathLike[str], size: int = 2_000) -> str:
    """The end of a log; empty when there is none."""
    return read_log(path, -size, size).decode(errors="replace").strip()


def log_bytes(path: str | os.PathLike[str]) -> int:
    """What a log takes; 0 when there is none."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def shorten(path: str | os.PathLike[str], limit: int) -> int:
    """Cut a log that is larger than ``limit`` bytes, but for its end. Returns: how many bytes went.

    What the session writes in this moment may stand before the end that was kept.
    """
    if log_bytes(path) <= limit:
        return 0
    try:
        fd = open_file(path, os.O_RDWR | os.O_APPEND)
    except OSError:
        return 0
    with os.fdopen(fd, "r+b", buffering=0):
        size = os.fstat(fd).st_size
        if size <= limit:
            return 0
        kept = limit // _KEPT_SHARE
        cut = size - kept
        end = os.pread(fd, kept, cut)
        for _ in range(_LOOKS):  # on a busy machine much may have been written since
            written = os.pread(fd, limit, cut + len(end))
            if not written:
                break
            end += written
        os.ftruncate(fd, 0)
        line = end.find(b"\n") + 1  # from the beginning of a line, where there is one
        os.write(fd, _CUT.format(cut + line, limit).encode() + end[line:])
        return cut + line


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
                info = path.lstat()
                found.append((info.st_mtime, path, info.st_size))
        for _, path, size in sorted(found):
            self.keep(path, size)
