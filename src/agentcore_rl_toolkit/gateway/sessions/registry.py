"""The sessions of a gateway: their keys and settings, and their rows in the store.

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
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote_to_bytes

import msgspec

from ...errors import ConfigError, ContractError
from ..store.reader import Counts, StoredSession
from ..store.writer import Store
from .session import Session, Stored
from .settings import SessionSettings

_TOMBSTONES = 100_000
MAX_SESSIONS = 200_000
# What a client writes into the path of a URL as it is (RFC 3986, pchar); anything else would arrive under another name.
# Parts may be divided by "/" (Harbor's are), none of which is a step up or down, or where a session's routes begin.
_ID = re.compile(
    r"(?=.{1,200}\Z)(?!(?:.*/)?(?:\.\.?|v1|traces)(?:/|\Z))[A-Za-z0-9._~!$&'()*+,;=:@-]+(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)*"
)


class Sessions:
    """All sessions of one gateway."""

    def __init__(self, store: Store, *, secret: bytes, limit: int = MAX_SESSIONS, model_id: str | None = None) -> None:
        self.store = store
        self.by_id: dict[bytes, Session] = {}
        self.limit = limit
        self.model_id = model_id  # of sessions whose settings name none
        self.turns = 0
        self.closing: Callable[[Session], None] | None = None  # called with a session that will make no further call
        self._secret = secret
        self._tombstones: OrderedDict[bytes, None] = OrderedDict()
        self._opening = asyncio.Lock()
        store.on_refused = self._refused

    def key_of(self, session_id: str) -> bytes:
        return b"sk-" + hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()[:48].encode()

    def create(self, session_id: str, settings: SessionSettings) -> Session:
        """Open a session; opening it again with the same id gives the same one, with the new settings.

        Raises: ContractError on an unusable id, a closed session, or when there are too many.
        """
        self.check([session_id])
        name = session_id.encode()
        known = self.by_id.get(name)
        if settings.model_id is None and self.model_id is not None:
            settings = msgspec.structs.replace(settings, model_id=self.model_id)
        if known is not None:
            known.use(settings)
            self._put(known)
            return known
        store = self.store
        session = self._make(session_id, settings, time.time(), Stored(store.next_session))
        store.next_session += 1
        self.by_id[name] = session
        self._tombstones.pop(name, None)
        self._put(session)
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

    def _make(self, session_id: str, settings: SessionSettings, created_s: float, stored: Stored) -> Session:
        return Session(session_id, self.key_of(session_id), settings, created_s, stored)

    def _put(self, session: Session) -> None:
        """Have a session stored as it is now."""
        self.store.put_session(
            session.number,
            session.id,
            session.created_s,
            session.closed_s,
            msgspec.json.encode(session.settings).decode(),
        )

    def _refused(self, session: Session) -> None:
        """The disk refused a call of a session: nothing later may go on from it."""
        session.forget_texts()
        session.stored.records -= 1

    async def opened(self, session_ids: Iterable[str], settings: SessionSettings) -> list[Session]:
        """Open sessions and wait until they are stored. Raises: ContractError as `create`; OSError when the disk
        refuses, which opens none.
        """
        names = list(session_ids)
        async with self._opening:
            self.check(names)  # all or none
            new = [name for name in dict.fromkeys(names) if name.encode() not in self.by_id]
            sessions = {name: self.create(name, settings) for name in dict.fromkeys(names)}
            error = await self.store.kept()
            if error is not None:
                made = [s for s in map(sessions.__getitem__, new) if self.by_id.get(s.id_bytes) is s]
                self.delete([s.id_bytes for s in made if not (s.records or s.inflight or s.closed)])
                raise error
            return [sessions[name] for name in names]

    def find(self, name: bytes) -> Session | None:
        """The session of a path, whose client may have written its id percent-encoded."""
        session = self.by_id.get(name)
        return session if session is not None or b"%" not in name else self.by_id.get(unquote_to_bytes(name))

    def deleted_before(self, name: bytes) -> bool:
        return name in self._tombstones

    def close(self, session: Session) -> None:
        """Refuse further calls. The caller stops the running ones."""
        if session.closed:
            return
        session.closed = True
        session.closed_s = time.time()
        self._put(session)
        session.forget_texts()
        session.recent = None
        session.worker = None
        if self.closing is not None:
            self.closing(session)

    def deliver(self, session: Session, call: int, whole: bool) -> None:
        """Store whether an agent has the whole reply of a call; one that none has uses up no turn."""
        undelivered = session.stored.undelivered
        if whole == (call not in undelivered) or self.by_id.get(session.id_bytes) is not session:
            return
        if whole:
            undelivered.discard(call)
        else:
            undelivered.add(call)
        session.started_turns += 1 if whole else -1
        self.store.deliver(call, whole=whole)

    def delete(self, names: Iterable[bytes]) -> list[Session]:
        """Forget sessions and their calls, for good. Returns those that existed."""
        gone: list[Session] = []
        for name in names:
            session = self.by_id.pop(name, None)
            if session is None:
                continue
            session.closed = True
            session.forget_texts()
            if self.closing is not None:
                self.closing(session)
            self.store.delete_session(session.number)
            self.bury(name)
            gone.append(session)
        return gone

    def bury(self, name: bytes) -> None:
        self._tombstones[name] = None
        if len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

    def restore(self) -> int:
        """Take up the stored sessions. Returns how many calls they have. Raises: GatewayError on a damaged store."""
        counts = self.store.reader.counts()
        for row in self.store.reader.sessions():
            self._restored(row, counts.get(row.number))
        return sum(found.calls for found in counts.values())

    def _restored(self, row: StoredSession, found: Counts | None) -> None:
        settings = msgspec.json.decode(row.settings, type=SessionSettings)
        stored = Stored(row.number)
        session = self._make(row.session_id, settings, row.created_s, stored)
        session.closed, session.closed_s = row.closed_s is not None, row.closed_s
        if session.closed:
            session.recent = None
        if found is not None:
            stored.records, session.turns = found.calls, found.turns
            session.errors = found.calls - found.turns
            session.started_turns = found.turns - found.undelivered
            session.next_index = found.last_index + 1
            self.turns += found.turns
        self.by_id[session.id_bytes] = session


def store_secret(directory: Path | None) -> bytes:
    """The secret that session keys are derived from, made on first use. None: it ends with the process.

    Raises: ConfigError when the file is unusable.
    """
    if directory is None:
        return secrets.token_bytes(32)
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
