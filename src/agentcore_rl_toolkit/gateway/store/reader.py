"""Reads a store: sessions, their calls as records, and damaged calls.

A reader sees committed data, also while a gateway writes. Every query runs to its end before its result is used, so it does not
block the gateway's maintenance.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CaptureError, GatewayError
from ..capture.record import ERROR, CallRecord, decode, encode
from .schema import SELECT_CALL, payload_of, trouble

log = logging.getLogger(__name__)

UNREADABLE = "the gateway's store is damaged: this call, or a call that its record refers to, cannot be read"
_SESSIONS_AT_ONCE = 1000


class StoredSession(NamedTuple):
    """A row of `sessions`. Units: unix seconds."""

    number: int
    session_id: str
    created_s: float
    closed_s: float | None
    settings: str


class Counts(NamedTuple):
    """Counts of a session: its calls, its turns, the turns that no agent took whole, and the highest index."""

    calls: int
    turns: int
    undelivered: int
    last_index: int


class Reader:
    """Reads with one connection, one query at a time. Raises: GatewayError where the file is damaged."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
        self._path = path
        self._lock = threading.Lock()  # between threads that read at the same time

    def close(self) -> None:
        self._database.close()

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(sql, values).fetchall()
        except sqlite3.Error as e:
            raise GatewayError(trouble(e, self._path)) from e

    # -- sessions

    def sessions(self) -> Iterator[StoredSession]:
        """Return all sessions in the order they were opened."""
        after = 0
        while rows := self.query(
            "SELECT * FROM sessions WHERE number > ? ORDER BY number LIMIT ?", after, _SESSIONS_AT_ONCE
        ):
            yield from map(StoredSession._make, rows)
            after = rows[-1][0]

    def counts(self) -> dict[int, Counts]:
        """Return the counts of each session. Only the index is read."""
        rows = self.query(
            "SELECT session, count(*), sum(status IN ('ok', 'untrainable')), sum(status IN ('ok', 'untrainable') AND "
            "NOT delivered), max(idx) FROM calls INDEXED BY calls_of_session GROUP BY session"
        )
        return {row[0]: Counts._make(row[1:]) for row in rows}

    # -- calls

    def call(self, number: int) -> bytes:
        """Return the record of one call, encoded."""
        rows = self.query(f"{SELECT_CALL} WHERE number = ?", number)
        if not rows:
            raise GatewayError(f"the store has no call {number}: its session was deleted")
        return payload_of(rows[0])

    def last_calls(self, session: int, count: int) -> list[tuple[Any, ...]]:
        """Return number, digest, status and whether it was delivered, of a session's last calls, the latest first."""
        return self.query(
            "SELECT number, digest, status, delivered FROM calls WHERE session = ? ORDER BY number DESC LIMIT ?",
            session,
            count,
        )

    def numbers(self, session: int) -> list[int]:
        """Return the numbers of a session's calls, in stored order."""
        return [n for (n,) in self.query("SELECT number FROM calls WHERE session = ? ORDER BY number", session)]

    def readable(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Return the encoded records of these calls: all calls of a session, in stored order.

        A damaged record, or a record that refers to a damaged record, becomes a failure.
        """
        known: set[str | None] = {None}  # the calls that a readable record may refer to
        for number in numbers:
            try:
                payload = self.call(number)
                record = decode(payload)
            except (GatewayError, CaptureError) as e:
                log.error("%s", e)
                whole = False
            else:
                refers_to = (record.prompt_base.call_id, record.messages_base.call_id, record.request_of)
                whole = known.issuperset(refers_to)
            if whole:
                known.add(record.call_id)
            else:
                lost = CallRecord(
                    call_id=f"lost-{number}", index=number, status=ERROR, dialect="chat", started_s=0.0, finished_s=0.0
                )
                lost.http_status, lost.error_type, lost.error = 503, "store", UNREADABLE
                payload = encode(lost)
            yield payload

    # -- what administrators set

    def value(self, name: str) -> Any:
        """Return a setting of the gateway. None: it is not set."""
        rows = self.query("SELECT value FROM settings WHERE name = ?", name)
        return rows[0][0] if rows else None
