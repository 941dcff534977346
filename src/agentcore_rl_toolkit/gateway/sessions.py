"""Sessions of a gateway: who may call, how often, with what; and where their calls lie in the journal.

A session exists because someone with the admin key created it, never because a call named it. Its key is derived from
the store's secret and its id, so that keys survive a restart and several processes agree on them without storing any.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError, ContractError
from . import journal as journals
from .finished import FinishedSessions
from .journal import Journal
from .prefixes import Prefixes
from .records import ERROR, NO_BASE, OK, UNTRAINABLE, VERSION, CallRecord, decode, encode

if TYPE_CHECKING:
    from .calls import Call
    from .histories import History
    from .repeats import Answered
    from .routing import Worker

_TOMBSTONES = 100_000
# What a client writes into the path of a URL as it is (RFC 3986, pchar); anything else would arrive under another name.
_ID = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@-]{1,200}")
# Stands where the disk failed to take a record, so that the places of the others hold.
LOST = encode(
    CallRecord(
        version=VERSION,
        call_id="lost",
        index=0,
        status=ERROR,
        dialect="chat",
        model=None,
        started_s=0.0,
        first_token_s=None,
        finished_s=0.0,
        weight_version_first=None,
        weight_version_last=None,
        prompt_base=NO_BASE,
        prompt_ids=b"",
        messages_base=NO_BASE,
        messages=b"",
        choices=[],
        http_status=503,
        error_type="store",
        error="the gateway's disk failed to take this call; its agent was told so",
    )
)


class SessionSettings(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """What a session's calls are held to.

    ``sampling_params`` win over the agent's; ``max_tokens`` is an upper bound on what it asks for.
    """

    sampling_params: dict[str, Any] = {}
    model_id: str | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    allowed_models: list[str] | None = None
    metadata: dict[str, Any] = {}


class Session:
    """One session. ``records`` counts its stored calls, ``turns`` those that are turns."""

    __slots__ = (
        "closed",
        "closed_s",
        "created_s",
        "errors",
        "history",
        "id",
        "id_bytes",
        "inflight",
        "key",
        "lengths",
        "messages",
        "next_index",
        "overrides",
        "positions",
        "prompts",
        "recent",
        "request",
        "settings",
        "started_turns",
        "turns",
        "worker",
    )

    def __init__(self, session_id: str, key: bytes, settings: SessionSettings, created_s: float) -> None:
        self.id = session_id
        self.id_bytes = session_id.encode()
        self.key = key
        self.settings = settings
        self.overrides = {k: msgspec.json.encode(v) for k, v in settings.sampling_params.items()}
        self.created_s = created_s
        self.closed = False
        self.closed_s: float | None = None
        self.next_index = 0
        self.started_turns = 0  # calls that count against max_turns: running ones and turns
        self.turns = 0
        self.errors = 0
        self.positions: array[int] = array("Q")
        self.lengths: array[int] = array("I")
        self.inflight: set[Call] = set()
        self.worker: Worker | None = None
        self.prompts = Prefixes()
        self.messages = Prefixes()
        self.recent: OrderedDict[int, Answered] | None = OrderedDict()
        self.history: History | None = None  # token mode: the session's messages as tokens, while they are in memory
        self.request: tuple[int, int] | None = (
            None  # hash of the last call's other fields, and the record that holds them
        )

    def lose(self, position: int) -> None:
        """The journal failed to keep the frame at `position`: remember the gap and let nothing later refer to it."""
        at = self.positions.index(position)
        self.lengths[at] = 0
        self.turns -= 1
        self.errors += 1
        self.forget_texts()

    def forget_texts(self) -> None:
        """Let nothing later refer to what was recorded so far."""
        self.prompts.clear()
        self.messages.clear()
        self.request = None

    @property
    def records(self) -> int:
        return len(self.positions)


class Sessions:
    """All sessions of one gateway process."""

    def __init__(
        self, journal: Journal, *, secret: bytes, limit: int, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.journal = journal
        self.by_id: dict[bytes, Session] = {}
        self.limit = limit
        self.defaults = dict(defaults or {})
        self.created = 0
        self.deleted = 0
        self.turns = 0
        self.finished = FinishedSessions()
        self.waiting: set[asyncio.Event] = set()  # those who wait for the next one
        self.closing: Callable[[Session], None] | None = None  # told of a session that will make no further call
        self._secret = secret
        self._tombstones: OrderedDict[bytes, None] = OrderedDict()
        self._frames: dict[bytes, array[int]] = {}  # positions of opened/closed frames, needed only to free disk space

    def key_of(self, session_id: str) -> bytes:
        return b"sk-" + hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()[:48].encode()

    def create(self, session_id: str, settings: SessionSettings) -> Session:
        """Open a session; opening it again with the same id gives the same one, with the new settings.

        Raises: ContractError on an unusable id, a closed session, or when there are too many.
        """
        if not _ID.fullmatch(session_id) or session_id in (".", ".."):
            raise ContractError(
                f"session id {session_id[:250]!r} must be 1 to 200 letters, digits or characters of .-_~!$&'()*+,;=:@"
            )
        name = session_id.encode()
        known = self.by_id.get(name)
        if self.defaults:
            settings = msgspec.structs.replace(settings, sampling_params={**self.defaults, **settings.sampling_params})
        if known is not None:
            if known.closed:
                raise ContractError(
                    f"session {session_id} is closed; delete it before opening it again", session_id=session_id
                )
            known.settings = settings
            known.overrides = {k: msgspec.json.encode(v) for k, v in settings.sampling_params.items()}
            self._note(known)
            return known
        if len(self.by_id) >= self.limit:
            raise ContractError(f"there are {self.limit} sessions already; fetch and delete finished ones")
        session = Session(session_id, self.key_of(session_id), settings, time.time())
        self.by_id[name] = session
        self._tombstones.pop(name, None)
        self.created += 1
        self._note(session)
        return session

    def _note(self, session: Session) -> None:
        payload = msgspec.msgpack.encode((session.created_s, session.settings))
        position, _ = self.journal.append(journals.OPENED, session.id_bytes, payload)
        self._frames.setdefault(session.id_bytes, array("Q")).append(position)

    def deleted_before(self, name: bytes) -> bool:
        return name in self._tombstones

    def close(self, session: Session) -> list[Call]:
        """Refuse further calls. Returns the running ones, which the caller must stop."""
        if session.closed:
            return []
        session.closed = True
        session.closed_s = time.time()
        self.finished.append(session.id)
        for changed in self.waiting:
            changed.set()
        running = list(session.inflight)
        position, _ = self.journal.append(journals.CLOSED, session.id_bytes, b"")
        self._frames.setdefault(session.id_bytes, array("Q")).append(position)
        session.forget_texts()
        session.recent = None
        session.worker = None
        if self.closing is not None:
            self.closing(session)
        return running

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
            self.journal.append(journals.DELETED, name, b"")
            dead.extend(session.positions)
            dead.extend(self._frames.pop(name, ()))
            self._bury(name)
            gone.append(session)
        if gone:
            self.journal.forget(dead)
            self.deleted += len(gone)
        return gone

    def _bury(self, name: bytes) -> None:
        self._tombstones[name] = None
        if len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

    def in_segment(self, number: int) -> list[Session]:
        """Sessions with calls in this segment of the journal.

        Those that only began there are noted again, further on.
        """
        for name, frames in list(self._frames.items()):
            session = self.by_id.get(name)
            if session is None or not any(p >> 40 == number for p in frames):
                continue
            if not session.closed:
                self._note(session)
                kept = array("Q", (p for p in frames if p >> 40 != number))
                kept.append(frames[-1])
                self._frames[name] = kept
        return [
            s
            for s in self.by_id.values()
            if any(p >> 40 == number for p in s.positions) or (s.closed and not s.positions)
        ]

    def replay(self, kind: int, session_id: str, payload: bytes, position: int, length: int) -> None:
        """Rebuild one step of the past from the journal."""
        name = session_id.encode()
        session = self.by_id.get(name)
        if kind == journals.OPENED:
            created_s, settings = msgspec.msgpack.decode(payload, type=tuple[float, SessionSettings])
            if session is None:
                session = self.by_id[name] = Session(session_id, self.key_of(session_id), settings, created_s)
            else:
                session.settings = settings
                session.overrides = {k: msgspec.json.encode(v) for k, v in settings.sampling_params.items()}
            self._frames.setdefault(name, array("Q")).append(position)
        elif session is None:
            return  # its opening was in a segment that retention removed
        elif kind == journals.CALL:
            record = decode(payload)
            session.positions.append(position)
            session.lengths.append(length)
            session.next_index = max(session.next_index, record.index + 1)
            if record.status in (OK, UNTRAINABLE):
                session.turns += 1
                session.started_turns += 1
                self.turns += 1
            else:
                session.errors += 1
        elif kind == journals.CLOSED:
            session.closed = True
            session.closed_s = time.time()
            self.finished.append(session_id)
            self._frames.setdefault(name, array("Q")).append(position)
        elif kind == journals.DELETED:
            dead = array("Q", session.positions)
            dead.extend(self._frames.pop(name, ()))
            for p in dead:
                self.journal.forget_one(p)
            del self.by_id[name]
            self._bury(name)

    def payloads(self, session: Session) -> list[bytes]:
        """The stored records of a session, encoded, in stored order."""
        read = self.journal.read
        return [read(p, n) if n else LOST for p, n in zip(session.positions, session.lengths, strict=True)]

    def payloads_at(self, frames: Iterable[tuple[int, int]]) -> list[bytes]:
        """The same for a thread, of frames that were flushed before (`Journal.flush`)."""
        self.journal.wait()
        read = self.journal.read
        return [read(p, n, settled=True) if n else LOST for p, n in frames]


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
