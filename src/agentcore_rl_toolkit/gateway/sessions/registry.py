"""Sessions of a gateway: who may call, how often, with what; and where their calls lie in the journal.

A session exists because someone with the admin key created it, never because a call named it. Its key is derived from
the store's secret and its id, so that keys survive a restart without being stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from ...errors import ConfigError, ContractError
from ..capture.build import Texts
from ..capture.record import undelivered
from ..errors import RequestError
from ..store.journal import Journal
from ..store.notes import NOWHERE, Notes
from ..store.restore import REFUSED, UNREADABLE, Restoring
from ..upstreams.router import Worker
from .closed_feed import FinishedSessions
from .one_at_a_time import OneAtATime
from .repeats import Repeated
from .settings import SessionSettings

_TOMBSTONES = 100_000
# What a client writes into the path of a URL as it is (RFC 3986, pchar); anything else would arrive under another name.
# Parts may be divided by "/" (Harbor's are), none of which is a step up or down, or where a session's routes begin.
_ID = re.compile(
    r"(?=.{1,200}\Z)(?!(?:.*/)?(?:\.\.?|v1|traces)(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)*"
)


class RunningCall(Protocol):
    """A call of a session that is under way."""

    @property
    def agent(self) -> Any: ...
    def abort(self, error: RequestError) -> None: ...
    def take_over(self, conn: Any, keep_alive: bool) -> None: ...


class Session:
    """One session. ``records`` counts its stored calls, ``turns`` those that are turns."""

    __slots__ = (
        "before",
        "closed",
        "closed_s",
        "created_s",
        "errors",
        "id",
        "id_bytes",
        "inflight",
        "key",
        "lengths",
        "next_index",
        "overrides",
        "positions",
        "recent",
        "settings",
        "started_turns",
        "texts",
        "turns",
        "untaken",
        "worker",
    )

    def __init__(self, session_id: str, key: bytes, settings: SessionSettings, created_s: float) -> None:
        self.id = session_id
        self.id_bytes = session_id.encode()
        self.key = key
        self.use(settings)
        self.before: tuple[SessionSettings, float] | None = None  # what the last opening replaced, and when (unix)
        self.created_s = created_s
        self.closed = False
        self.closed_s: float | None = None
        self.next_index = 0
        self.started_turns = 0  # calls that count against max_turns: running ones and turns
        self.turns = 0
        self.errors = 0
        self.positions: array[int] = array("Q")
        self.lengths: array[int] = array("I")
        self.untaken: set[int] = set()  # positions of turns whose replies no agent took whole
        self.inflight: set[RunningCall] = set()
        self.worker: Worker | None = None
        self.texts = Texts()
        self.recent: OrderedDict[int, Repeated] | None = OrderedDict()

    def use(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.overrides = {k: msgspec.json.encode(v) for k, v in settings.sampling_params.items()}

    def change(self, settings: SessionSettings, at_s: float) -> None:
        """Use other settings, until `Sessions.go_back` perhaps."""
        self.before = (self.settings, at_s) if at_s else None
        self.use(settings)

    def lose(self) -> None:
        """A call counted as a turn was not stored; what stands in its place `Sessions` has seen to."""
        self.turns -= 1
        self.started_turns -= 1
        self.errors += 1

    def leave_gap(self, position: int) -> bool:
        """The journal refused the call at `position`: keep its place and let nothing later refer to what is before.

        Of several refused in a row one place is kept, and their number. Returns False when there is no such call.
        """
        self.forget_texts()
        try:
            at = self.positions.index(position)
        except ValueError:
            return False
        if at and at + 1 == len(self.positions) and self.positions[at - 1] == NOWHERE:
            self.positions.pop()
            self.lengths.pop()
            self.lengths[at - 1] += 1
        else:
            self.positions[at], self.lengths[at] = NOWHERE, 1
        return True

    def forget_texts(self) -> None:
        """Let nothing later refer to what was recorded so far."""
        self.texts.clear()

    @property
    def records(self) -> int:
        return len(self.positions)


class Sessions:
    """All sessions of one gateway."""

    def __init__(self, journal: Journal, *, secret: bytes, limit: int, defaults: SessionSettings | None = None) -> None:
        self.journal = journal
        self.by_id: dict[bytes, Session] = {}
        self.limit = limit
        self.defaults = defaults or SessionSettings()
        self.created = 0
        self.deleted = 0
        self.turns = 0
        self.finished = FinishedSessions()
        self.waiting: set[asyncio.Event] = set()  # those who wait for the next one
        self.closing: Callable[[Session], None] | None = None  # told of a session that will make no further call
        self._secret = secret
        self._tombstones: OrderedDict[bytes, None] = OrderedDict()
        self._opening = OneAtATime()
        self.notes = Notes(journal, self.by_id)

    def key_of(self, session_id: str) -> bytes:
        return b"sk-" + hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()[:48].encode()

    def create(self, session_id: str, settings: SessionSettings) -> Session:
        """Open a session; opening it again with the same id gives the same one, with the new settings.

        Raises: ContractError on an unusable id, a closed session, or when there are too many.
        """
        self.check([session_id])
        name = session_id.encode()
        known = self.by_id.get(name)
        settings = settings.over(self.defaults)
        if known is not None:
            known.change(settings, time.time())
            self.notes.opened(known)
            return known
        session = self.make(session_id, settings, time.time())
        self.by_id[name] = session
        self._tombstones.pop(name, None)
        self.created += 1
        self.notes.opened(session)
        return session

    def check(self, session_ids: Iterable[str]) -> None:
        """Raises: ContractError when one of them cannot be opened."""
        new = set()
        for session_id in session_ids:
            if not _ID.fullmatch(session_id):
                raise ContractError(
                    f"session id {session_id[:250]!r} must be 1 to 200 letters, digits or characters of .-_~!$&'()*+,;=:@, "
                    "in parts divided by / of which none is empty, '.', '..', 'v1' or 'traces'"
                )
            known = self.by_id.get(session_id.encode())
            if known is None:
                new.add(session_id)
            elif known.closed:
                raise ContractError(
                    f"session {session_id} is closed; delete it before opening it again", session_id=session_id
                )
        if new and len(self.by_id) + len(new) > self.limit:
            held = f"there are {len(self.by_id)} sessions already and may be {self.limit}"
            raise ContractError(f"{held}; fetch and delete finished ones")

    def make(self, session_id: str, settings: SessionSettings, created_s: float) -> Session:
        return Session(session_id, self.key_of(session_id), settings, created_s)

    def go_back(self, session: Session) -> None:
        """Undo the session's last opening, which was one of an open session."""
        if session.before is not None:
            session.use(session.before[0])
            session.before = None
            self.notes.opened(session)

    async def opened(self, session_ids: Iterable[str], settings: SessionSettings) -> list[Session]:
        """Open sessions and wait until they are stored. Raises: ContractError as `create`; OSError when the disk
        refuses, which opens none, and changes none that is open.
        """
        names = list(session_ids)
        async with self._opening.of(names):
            self.check(names)  # all or none
            before = {name for name in names if name.encode() in self.by_id}
            sessions = {name: self.create(name, settings) for name in dict.fromkeys(names)}
            await self.journal.kept()
            if any(map(self.notes.owes, sessions.values())):
                self._take_back([s for s in sessions.values() if self.by_id.get(s.id_bytes) is s], before)
                raise self.journal.failed or OSError("the store refused")
            return [sessions[name] for name in names]

    def _take_back(self, sessions: list[Session], before: set[str]) -> None:
        stored = []
        for session in sessions:
            if session.id in before:
                self.go_back(session)
            elif session.records or session.inflight or session.closed:
                continue
            elif self.notes.owes(session):
                self.notes.cancel(session)
                self.by_id.pop(session.id_bytes)
            else:
                stored.append(session.id_bytes)
        self.delete(stored)

    def find(self, name: bytes) -> Session | None:
        """The session of a path, whose client may have written its id percent-encoded."""
        session = self.by_id.get(name)
        return session if session is not None or b"%" not in name else self.by_id.get(unquote_to_bytes(name))

    def deleted_before(self, name: bytes) -> bool:
        return name in self._tombstones

    def close(self, session: Session) -> list[RunningCall]:
        """Refuse further calls. Returns the running ones, which the caller must stop."""
        if session.closed:
            return []
        session.closed = True
        session.closed_s = time.time()
        self.finished.append(session.id)
        for changed in self.waiting:
            changed.set()
        running = list(session.inflight)
        self.notes.closed(session)
        session.forget_texts()
        session.recent = None
        session.worker = None
        if self.closing is not None:
            self.closing(session)
        return running

    def took(self, session: Session, position: int, *, whole: bool) -> None:
        """Note whether an agent has the whole reply that is recorded there; one that none has uses up no turn."""
        if whole == (position not in session.untaken) or self.by_id.get(session.id_bytes) is not session:
            return
        if whole:
            session.untaken.discard(position)
        elif position in session.positions:
            session.untaken.add(position)
        else:
            return
        session.started_turns += 1 if whole else -1
        self.notes.untaken(session)

    def delete(self, names: Iterable[bytes]) -> list[Session]:
        """Forget sessions and their calls, for good. Returns those that existed."""
        gone: list[Session] = []
        dead: array[int] = array("Q")
        for name in names:
            session = self.by_id.pop(name, None)
            if session is None:
                continue
            session.closed = True
            session.forget_texts()
            if self.closing is not None:
                self.closing(session)
            self.notes.deleted(name)
            dead.extend(session.positions)
            dead.extend(self.notes.frames.pop(name, ()))
            self.bury(name)
            gone.append(session)
        if gone:
            oldest = next(iter(self.by_id.values()), None)
            self.journal.trust(float("inf") if oldest is None else oldest.created_s)
            self.journal.forget(dead)
            self.deleted += len(gone)
        return gone

    def bury(self, name: bytes) -> None:
        self._tombstones[name] = None
        if len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

    def last_frame(self, session: Session) -> int:
        """The position of the last thing that is stored of a session."""
        calls, notes = session.positions, self.notes.frames.get(session.id_bytes, ())
        return max(max(calls, default=0), max(notes, default=0))

    def callers(self, number: int) -> dict[bytes, Session]:
        """Sessions with calls in this segment of the journal."""
        return {s.id_bytes: s for s in self.by_id.values() if any(p >> 40 == number for p in s.positions)}

    def in_segment(self, number: int) -> list[Session]:
        """Sessions with calls in this segment, and closed ones that never made any.

        Those that only began there are noted again, further on.
        """
        victims = self.callers(number)
        for name, frames in self.notes.frames.items():
            session = self.by_id.get(name)
            silent = session is not None and session.closed and not session.records
            if session is not None and silent and any(p >> 40 == number for p in frames):
                victims[name] = session
        self.move_notes(number, but=victims)
        return list(victims.values())

    def move_notes(self, number: int, *, but: Container[bytes] = ()) -> None:
        """Note again, further on, what is noted of sessions in this segment."""
        for name, frames in list(self.notes.frames.items()):
            session = self.by_id.get(name)
            if session is None or name in but or not any(p >> 40 == number for p in frames):
                continue
            self.notes.frames[name] = array("Q", (p for p in frames if p >> 40 != number))
            self.notes.opened(session)
            if NOWHERE in session.positions:
                self.notes.gaps(session)
            if session.untaken:
                self.notes.untaken(session)
            if session.closed:
                self.notes.closed(session)

    def restore(self) -> int:
        """Read the journal back. Returns the number of its frames."""
        restoring = Restoring(self)
        frames = self.journal.recover(restoring.replay)
        restoring.finish()
        return frames

    def payloads(self, session: Session) -> list[bytes]:
        """The stored records of a session, encoded, in stored order."""
        found = self._payloads(zip(session.positions, session.lengths, strict=True), settled=False)
        return [self.judged(session, *each) for each in enumerate(found)] if session.untaken else found

    @staticmethod
    def judged(session: Session, place: int, payload: bytes) -> bytes:
        """A stored record as it is to be read: whether its reply was taken was not known when it was written."""
        return payload if session.positions[place] not in session.untaken else undelivered(payload)

    def payloads_at(self, frames: Iterable[tuple[int, int]]) -> list[bytes]:
        """The same for a thread, of frames that were flushed before (`Journal.flush`)."""
        self.journal.wait()
        return self._payloads(frames, settled=True)

    def _payloads(self, frames: Iterable[tuple[int, int]], *, settled: bool) -> list[bytes]:
        read = self.journal.read
        return [REFUSED if p == NOWHERE else read(p, n, settled=settled) if n else UNREADABLE for p, n in frames]


def store_secret(directory: Path) -> bytes:
    """The secret that session keys are derived from, made on first use.

    Raises: ConfigError when the file is unusable.
    """
    path = directory / "secret"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = path.read_bytes()
        if len(secret) < 32:
            raise ConfigError(f"{path} is damaged; remove it (every session key changes with it)") from None
        return secret
    secret = secrets.token_bytes(32)
    with os.fdopen(fd, "wb") as file:
        file.write(secret)
    return secret
