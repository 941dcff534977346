"""The writes of the next commit."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

from .schema import INSERT_CALL, PUT_SESSION, Row

Done = Callable[[OSError | None], None]


class Numbered(Protocol):
    """A session as the store knows it: its number."""

    @property
    def number(self) -> int: ...


class QueuedCall(NamedTuple):
    """A call that is to be stored."""

    row: Row
    session: Numbered
    done: Done | None


class Queue:
    """The writes of the next commit. ``after`` runs when all of it is committed, or was refused."""

    def __init__(self) -> None:
        self.calls: list[QueuedCall] = []
        self.sessions: dict[int, tuple[Any, ...]] = {}
        self.deleted: dict[int, None] = {}
        self.delivered: dict[int, bool] = {}
        self.settings: dict[str, Any] = {}
        self.after: list[Done] = []

    def __bool__(self) -> bool:
        return bool(self.calls or self.after or self._more)

    @property
    def _more(self) -> bool:
        """Whether there is something beside calls."""
        return bool(self.sessions or self.deleted or self.delivered or self.settings)

    def write(self, database: sqlite3.Connection, calls: list[QueuedCall]) -> None:
        """One transaction with these calls. Raises: sqlite3.Error, which leaves all as it was."""
        if len(calls) == 1 and not self._more:
            database.execute(INSERT_CALL, calls[0].row)  # a transaction by itself, at half the cost
            return
        with transaction(database):
            if self.sessions:
                database.executemany(PUT_SESSION, self.sessions.values())
            if self.deleted:
                numbers = [(number,) for number in self.deleted]
                database.executemany("DELETE FROM sessions WHERE number = ?", numbers)
                database.executemany("INSERT OR IGNORE INTO deleted VALUES(?)", numbers)
            if calls:
                database.executemany(INSERT_CALL, [call.row for call in calls])
            if self.delivered:
                database.executemany(
                    "UPDATE calls SET delivered = ? WHERE number = ?",
                    [(whole, number) for number, whole in self.delivered.items()],
                )
            if self.settings:
                database.executemany("INSERT OR REPLACE INTO settings VALUES(?,?)", self.settings.items())

    def written(self) -> list[Done]:
        """All but calls is stored. Returns what is to run now."""
        for each in (self.sessions, self.deleted, self.delivered, self.settings):
            each.clear()
        after, self.after = self.after, []
        return after


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit all statements of the block together, or none of them."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
        raise
