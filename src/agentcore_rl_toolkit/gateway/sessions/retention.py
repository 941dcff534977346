"""Holding a store to its bounds of age and size.

**Age** is that of a session's closing, by the monotonic clock (of one that was closed before this process, by the wall
clock); open sessions are never too old.

**Size** takes the sessions that were quiet longest, also those that are open and do not call at the moment: a full disk
would stop all of them.
"""

from __future__ import annotations

import heapq
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator

from .registry import Sessions
from .session import Session

log = logging.getLogger(__name__)

_PARTS = 8  # the write-ahead log may have this part of a bound of size
_LEAST_BYTES = 2**20
_SLICE_S = 0.01  # for so long at a time sessions are deleted,
_LONG_SLICE_S = 0.05  # or for so long, when the store is above its bound: slow disks must keep pace
_AT_ONCE = 100


class Retention:
    """Deletes what is too old or too much; to be looked after now and then. Units: seconds, bytes."""

    def __init__(self, sessions: Sessions, counters: Counter[str], *, age_s: float | None, size: int | None) -> None:
        self._sessions = sessions
        self._counters = counters
        self._age_s = age_s
        self._size = size
        if size is not None:
            store = sessions.store
            store.wal.longest_bytes = min(store.wal.longest_bytes, max(_LEAST_BYTES, size // _PARTS))

    def tend(self) -> None:
        if self._sessions.store.failed is not None:
            return
        if self._age_s is not None:
            self._by_age(self._age_s)
        if self._size is not None:
            # The rest is for the write-ahead log, and for free pages that are not given back yet.
            self._by_size(self._size * (_PARTS - 1) // _PARTS - self._sessions.store.wal.longest_bytes)

    def _by_age(self, bound_s: float) -> None:
        sessions, since_s = self._sessions, time.monotonic() - bound_s
        victims: list[bytes] = []
        while sessions.closings and sessions.closings[0][0] < since_s:
            _, session = sessions.closings.popleft()
            if sessions.by_id.get(session.id_bytes) is session:
                victims.append(session.id_bytes)
        if victims:
            self._delete(victims)
            log.warning(
                "retention: deleted %d sessions that were closed more than %g h ago (--retention-hours)",
                len(victims),
                bound_s / 3600,
            )

    def _by_size(self, bound: int) -> None:
        store = self._sessions.store
        if (before := store.space.used_bytes) <= bound:
            return
        gone = were_open = 0
        assert self._size is not None
        until = time.monotonic() + (_SLICE_S if store.total_bytes <= self._size else _LONG_SLICE_S)
        store.commit()
        try:
            victims = self._longest_quiet()
            while not store.deleting and store.space.used_bytes > bound and time.monotonic() < until:
                if store.space.removing:  # of those that are deleted already
                    store.space.remove_some()
                    continue
                session = next(victims, None)
                if session is None:
                    break
                gone, were_open = gone + 1, were_open + (not session.closed)
                self._delete([session.id_bytes])
                store.commit()
        except sqlite3.Error as e:
            log.error("retention: removing calls failed, and is tried again: %s", e)
        if gone:
            log.warning(
                "retention: deleted the %d sessions that were quiet longest, %d of them open, because the store had %d bytes "
                "and may have %d (--retention-gb)",
                gone,
                were_open,
                before,
                self._size,
            )

    def _longest_quiet(self) -> Iterator[Session]:
        """Sessions with calls, and closed ones, in the order of their last call; not those that call right now."""
        known = self._sessions.by_id.values()
        found = (s for s in known if (s.records or s.closed) and not s.inflight)
        yield from heapq.nsmallest(_AT_ONCE, found, key=lambda s: (s.stored.last_call, s.number))

    def _delete(self, names: list[bytes]) -> None:
        self._counters["sessions_expired"] += len(names)
        self._sessions.delete(names)
