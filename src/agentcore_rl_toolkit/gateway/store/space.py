"""The space of a store's file: calls of deleted sessions are removed by and by, and what is free at its end is given back."""

from __future__ import annotations

import sqlite3
import time
from collections import deque

from .queue import transaction

_SLICE_S = 0.005  # deleted calls are removed for so long at a time
_REMOVED_AT_ONCE = 64
_SPARE = 0.1  # share of the file that may be free before its end is given back
_SPARE_PAGES = 64
_GIVEN_BACK_AT_ONCE = 64  # pages


class Space:
    """See the module. ``removing`` are deleted sessions that have calls in the file."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.removing = deque(number for (number,) in database.execute("SELECT session FROM deleted"))
        self._page_bytes: int = database.execute("PRAGMA page_size").fetchone()[0]

    def _pages(self) -> tuple[int, int]:
        [pages] = self._database.execute("PRAGMA page_count").fetchone()
        [free] = self._database.execute("PRAGMA freelist_count").fetchone()
        return pages, free

    @property
    def used_bytes(self) -> int:
        """What sessions take: the file without its free pages."""
        pages, free = self._pages()
        return (pages - free) * self._page_bytes

    @property
    def file_bytes(self) -> int:
        return self._pages()[0] * self._page_bytes

    @property
    def untidy(self) -> bool:
        """Whether there is something to remove, or too much free space to keep."""
        pages, free = self._pages()
        return bool(self.removing) or free > max(_SPARE_PAGES, pages * _SPARE)

    def tidy(self) -> None:
        """Remove calls of deleted sessions, and give free space back, for a moment. Raises: sqlite3.Error."""
        until = time.monotonic() + _SLICE_S
        while self.removing and time.monotonic() < until:
            self.remove_some()
        if time.monotonic() < until and self.untidy:
            # Not `execute`, which ends after the first page.
            self._database.executescript(f"PRAGMA incremental_vacuum({_GIVEN_BACK_AT_ONCE})")

    def remove_some(self) -> None:
        """Remove some calls of deleted sessions. Raises: sqlite3.Error."""
        session, database = self.removing[0], self._database
        some = f"(SELECT number FROM calls WHERE session = ? LIMIT {_REMOVED_AT_ONCE})"
        with transaction(database):
            database.execute(f"DELETE FROM choices WHERE call IN {some}", (session,))
            count = database.execute(f"DELETE FROM calls WHERE number IN {some}", (session,)).rowcount
            if count < _REMOVED_AT_ONCE:
                database.execute("DELETE FROM deleted WHERE session = ?", (session,))
        if count < _REMOVED_AT_ONCE:
            self.removing.popleft()
