"""What a session remembers of its last calls, for requests that are sent again (`calls.dedup`)."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

REMEMBERED = 64  # answered calls per session that a repeated request may be joined to


class _Session(Protocol):
    recent: OrderedDict[int, Repeated] | None


class _Sessions(Protocol):
    def took(self, session: Any, position: int, *, whole: bool) -> None: ...


class Answer:
    """A recorded reply: which stored call it is, and how many connections carry it, or carried it to the end (``ways``)."""

    __slots__ = ("_sessions", "call_id", "digest", "finished", "position", "session", "ways")

    def __init__(self, sessions: _Sessions, session: _Session, position: int, call_id: str, digest: int) -> None:
        self._sessions = sessions
        self.session = session
        self.position = position
        self.call_id = call_id
        self.digest = digest
        self.ways = 0
        self.finished = time.monotonic()

    def old(self, limit_s: float) -> bool:
        return time.monotonic() - self.finished > limit_s

    def not_taken(self, *, sure: bool) -> None:
        """A connection with this reply ended too early. ``sure``: its agent cannot have got it whole."""
        self.ways -= 1
        if self.ways > 0:
            return
        session = self.session
        if session.recent is not None:
            lost = repeats_of(session.recent, self.digest).lost
            if self not in lost:
                lost.append(self)
                del lost[:-REMEMBERED]
        if sure:
            self._sessions.took(session, self.position, whole=False)


@dataclass(slots=True)
class Repeated:
    """The calls of one body that may be asked for again: the last one that was answered, those that no agent took
    whole, oldest first, and how many failed since and were not asked for again.
    """

    last: Answer | None = None
    lost: list[Answer] = field(default_factory=list)
    failed: int = 0


def repeats_of(recent: OrderedDict[int, Repeated], digest: int) -> Repeated:
    """What is known of a body; only the last few of a session are kept."""
    known = recent.get(digest)
    if known is None:
        known = recent[digest] = Repeated()
        if len(recent) > REMEMBERED:
            recent.popitem(last=False)
    else:
        recent.move_to_end(digest)
    return known
