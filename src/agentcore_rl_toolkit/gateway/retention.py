"""Dropping whole segments of the journal, oldest first, while the store is over its bounds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .server import Gateway


_PARTS = 8  # what is dropped at a time is a segment: the bound holds to an eighth
_LEAST_BYTES = 2**20


def retain(gateway: Gateway) -> None:
    """Forget the sessions with calls in segments that are too many or too old; those that still call keep theirs."""
    config, journal, sessions = gateway.config, gateway.journal, gateway.sessions
    sessions.notes.tend()
    if config.retention_bytes is not None:
        journal.segment_bytes = min(journal.segment_bytes, max(_LEAST_BYTES, config.retention_bytes // _PARTS))
    if config.retention_s is not None:
        journal.begin_anew(config.retention_s / _PARTS)
    while (oldest := journal.oldest()) is not None:
        number, born = oldest
        too_big = config.retention_bytes is not None and journal.total_bytes > config.retention_bytes
        too_old = config.retention_s is not None and time.time() - born > config.retention_s
        if not (too_big or too_old):
            return
        victims = sessions.in_segment(number)
        if any(s.inflight for s in victims):
            return
        gateway.counters["sessions_expired"] += len(victims)
        sessions.delete([s.id_bytes for s in victims])
        if journal.owing:
            journal.fill(0)  # what is owed goes in front of it: what damage has cost must be known without the segment
        journal.settle()  # what `in_segment` noted again must be stored before its first note is gone
        if number in journal.segments:
            journal.drop(number)
