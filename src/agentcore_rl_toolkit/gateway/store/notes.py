"""What the journal holds of sessions besides their calls: that they were opened, closed and deleted, what they lack.

A deletion is noted twice: a damaged note would bring its session back, with every call. The second one lies so far
behind the first that one damaged block of a disk does not reach both. It is made when as much has been written, or is
written for that purpose where nothing else is.

What the disk refused is owed, and comes before anything else.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ..sessions.settings import SessionSettings
from . import journal as journals

if TYPE_CHECKING:
    from ..sessions.registry import Session
    from .journal import Journal

NOWHERE = 0  # the position of a call that was never stored; segments count from 1
_APART = 4096  # bytes: the block of most disks and file systems


class Opened(msgspec.Struct, array_like=True):
    """That a session was opened, or opened again (``changed_s``, unix seconds; 0: the first time, or unknown).

    With ``first`` nothing that lies before it is of this session; None: unknown, the store is an older one.
    """

    created_s: float
    settings: SessionSettings
    changed_s: float = 0.0
    first: bool | None = None


class Judged(msgspec.Struct, array_like=True):
    """What damage has cost a session that has so many ``records``: how many calls it lacks, and which it gave up: their
    positions, and whether they were turns.
    """

    records: int
    lacks: int
    given_up: list[tuple[int, bool]]


class Notes:
    """Makes the notes of the gateway's sessions."""

    def __init__(self, journal: Journal, by_id: Mapping[bytes, Session]) -> None:
        self._journal = journal
        self._by_id = by_id
        self.frames: dict[bytes, array[int]] = {}  # positions of all frames but calls, needed only to free disk space
        self._owed: dict[tuple[int, bytes], bytes] = {}  # with their payload, in the order they must be made in
        self._deleted: dict[bytes, int] = {}  # deletions that are noted once, and where, in that order
        self._end = -1  # of the journal, when it was last looked at
        journal.on_lost, journal.repay, journal.closing = self._lost, self._repay, self._last

    def of(self, name: bytes) -> array[int]:
        return self.frames.setdefault(name, array("Q"))

    def opened(self, session: Session) -> None:
        self._deleted.pop(session.id_bytes, None)  # it would delete this one
        changed_s = 0.0 if session.before is None else session.before[1]
        first = not session.positions and not self.frames.get(session.id_bytes)
        told = Opened(session.created_s, session.settings, changed_s, first)
        self._append(journals.OPENED, session, msgspec.msgpack.encode(told))

    def closed(self, session: Session) -> None:
        self._append(journals.CLOSED, session, b"")

    def gaps(self, session: Session) -> None:
        places = [(i, session.lengths[i]) for i, position in enumerate(session.positions) if position == NOWHERE]
        self._append(journals.GAPS, session, msgspec.msgpack.encode(places))

    def untaken(self, session: Session) -> None:
        self._append(journals.UNTAKEN, session, msgspec.msgpack.encode(sorted(session.untaken)))

    def deleted(self, name: bytes) -> None:
        for kind in (journals.OPENED, journals.GAPS, journals.CLOSED, journals.JUDGED, journals.UNTAKEN):
            self._owed.pop((kind, name), None)
        self._delete(name)

    def _delete(self, name: bytes) -> None:
        position, _ = self._journal.append(journals.DELETED, name, b"")
        self._deleted.pop(name, None)
        self._deleted[name] = position

    def _append(self, kind: int, session: Session, payload: bytes) -> None:
        position, _ = self._journal.append(kind, session.id_bytes, payload)
        self.of(session.id_bytes).append(position)

    # -- deletions, for the second time

    def tend(self) -> None:
        """Note again those that were noted long enough before. To be called now and then."""
        if self._deleted and not self._journal.owing:
            self._again(fill=self._journal.end == self._end)
            self._end = self._journal.end

    def _last(self) -> None:
        if self._deleted and not self._journal.owing:
            self._again(fill=True)

    def _again(self, *, fill: bool) -> None:
        journal = self._journal
        if fill and not _apart(next(reversed(self._deleted.values())), journal.end):
            journal.fill(_APART)
        due = [name for name, position in self._deleted.items() if _apart(position, journal.end)]
        for name in due:
            del self._deleted[name]
            journal.append(journals.DELETED, name, b"")

    # -- what must be stored before anything else is

    def owe(self, kind: int, name: bytes, payload: bytes = b"") -> None:
        self._owed[kind, name] = payload
        self._journal.owing = True

    def owes(self, session: Session) -> bool:
        """Whether the disk has refused to take the session's opening."""
        return (journals.OPENED, session.id_bytes) in self._owed

    def cancel(self, session: Session) -> None:
        """The session is not to be opened after all."""
        self._owed.pop((journals.OPENED, session.id_bytes), None)
        self.frames.pop(session.id_bytes, None)
        self._journal.owing = bool(self._owed)

    def _lost(self, kind: int, name: bytes, payload: bytes, position: int) -> None:
        """The journal could not store a frame."""
        session = self._by_id.get(name)
        if kind == journals.CALL:
            if session is not None and session.leave_gap(position):
                self.owe(journals.GAPS, name)
            return
        frames = self.frames.get(name)
        if frames is not None and position in frames:
            frames.remove(position)
        if session is not None or kind == journals.DELETED or name == journals.EVERYBODY:
            self.owe(kind, name, payload)

    def _repay(self) -> None:
        owed, self._owed = self._owed, {}
        for (kind, name), payload in owed.items():
            session = self._by_id.get(name)
            if kind == journals.DELETED:
                self._delete(name)
            elif name == journals.EVERYBODY:
                self._journal.judged(self._journal.append(kind, name, payload)[0])
            elif session is None:
                continue
            elif kind == journals.OPENED:
                self.opened(session)
            elif kind == journals.GAPS:
                self.gaps(session)
            elif kind == journals.UNTAKEN:
                self.untaken(session)
            else:
                self._append(kind, session, payload)


def _apart(position: int, end: int) -> bool:
    return end >> 40 != position >> 40 or end - position >= _APART
