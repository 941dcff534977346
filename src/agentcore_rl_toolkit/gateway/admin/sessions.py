"""Routes for trainers: open, fetch, close and delete sessions, learn which are finished.

Each route takes and gives many sessions. A long answer (a fetch) is written piece by piece, with a pause for the agents' calls
in between.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from ...messages.errors import RequestError
from ...messages.wire import ModelRequest
from ..capture.record import FetchedHead
from ..http.messages import Request, decode_body
from ..sessions.registry import Sessions
from ..sessions.session import Session
from ..sessions.settings import SessionSettings
from ..store.reader import DeletedError, Reader

_U32 = struct.Struct("<I")


class CreateSessions(msgspec.Struct, forbid_unknown_fields=True):
    session_ids: list[str]
    settings: SessionSettings = SessionSettings()


class Names(msgspec.Struct, forbid_unknown_fields=True):
    session_ids: list[str]
    close: bool = True


class SessionRoutes:
    """The routes of trainers' requests about sessions."""

    def __init__(self, sessions: Sessions, check: Callable[[SessionSettings, ModelRequest], None]) -> None:
        self._sessions = sessions
        self._check = check  # of sampling parameters, against the engine

    async def create(self, request: Request) -> dict[str, Any]:
        asked = decode_body(request.body, CreateSessions)
        created = await self.open(asked.session_ids, asked.settings)
        return {"sessions": [{"session_id": s.id, "api_key": s.key.decode()} for s in created]}

    async def open(self, session_ids: list[str], settings: SessionSettings) -> list[Session]:
        """Open sessions, all or none. Raises: RequestError on bad settings, or when the disk refuses; ContractError."""
        self._check(settings, settings.check())
        try:
            return await self._sessions.opened(session_ids, settings)
        except OSError as e:
            raise RequestError(
                f"the gateway cannot store a session ({e.strerror or e}); try again", kind="overloaded"
            ) from e

    async def list_all(self, request: Request) -> dict[str, Any]:
        """All sessions in the order they were opened, with their calls under way; ``?running=1``: those with calls only."""
        running = b"running=1" in request.query.split(b"&")
        now_s, out = time.monotonic(), []
        for number, session in enumerate(list(self._sessions.by_id.values())):
            if session.inflight or not running:
                out.append(described(session, now_s))
            if number % 2000 == 1999:
                await asyncio.sleep(0)  # agents' calls go first
        return {"sessions": out}

    def close_session(self, session: Session) -> bool:
        """Close a session and end its running calls: what arrives now is too late. True if it was open."""
        was_open = not session.closed
        running = list(session.inflight)
        for call in running:
            call.abort(RequestError(f"session {session.id} was closed", kind="permission"))
        self._sessions.close(session)
        return was_open

    async def delete(self, request: Request) -> dict[str, Any]:
        asked = decode_body(request.body, Names)
        return {"deleted": await self.delete_sessions(asked.session_ids)}

    async def delete_sessions(self, session_ids: list[str]) -> int:
        """Delete sessions, and return when that is stored. Returns how many there were.

        Raises: RequestError 503 where the disk does not take it: after a crash the sessions would be there again.
        """
        sessions = self._sessions
        names = [s.encode() for s in session_ids]
        for name in names:
            session = sessions.by_id.get(name)
            if session is not None:
                self.close_session(session)
        gone = sessions.delete(names)
        error = await sessions.store.kept()
        if error is not None:
            raise RequestError(f"the deletion is not stored, try it again: {error}", kind="overloaded", status=503)
        return len(gone)

    async def fetch(self, request: Request) -> AsyncIterator[bytes]:
        asked = decode_body(request.body, Names)
        sessions = self._sessions
        if asked.close:
            for session in map(sessions.by_id.get, [name.encode() for name in asked.session_ids]):
                if session is not None:
                    self.close_session(session)
        await sessions.store.kept()
        return sessions.store.read(lambda reader: self._frames(reader, asked.session_ids))

    def _frames(self, reader: Reader, session_ids: list[str]) -> Iterator[bytes]:
        """Of each session a head and its records, each with its length before it. Runs in a thread."""
        for session_id in session_ids:
            # Looked up now and not before: while others were written it may have been deleted.
            session = self._sessions.by_id.get(session_id.encode())
            numbers = [] if session is None else reader.numbers(session.number)
            head = FetchedHead(session_id=session_id, known=False)
            if session is None or self._sessions.by_id.get(session_id.encode()) is not session:
                numbers = []  # deleted, and some of its calls may be gone
            else:
                head = FetchedHead(
                    session_id=session_id,
                    known=True,
                    closed=session.closed,
                    records=len(numbers),
                    created_s=session.created_s,
                    train=session.settings.train,
                    metadata=session.settings.metadata,
                )
            left = len(numbers)
            yield from _frame(msgspec.msgpack.encode(head))
            try:
                for data in reader.readable(numbers):
                    yield from _frame(data)
                    left -= 1
            except DeletedError:  # empty records report it, and the other sessions stay whole
                yield _U32.pack(0) * left


def _frame(data: bytes) -> tuple[bytes, bytes]:
    return _U32.pack(len(data)), data


def described(session: Session, now_s: float) -> dict[str, Any]:
    """A session as a person asks for it. Units: unix seconds; of calls: seconds since their start, and until their deadline."""
    return {
        "session_id": session.id,
        "created_s": session.created_s,
        "closed_s": session.closed_s,
        "turns": session.turns,
        "errors": session.errors,
        "records": session.records,
        "last_call_s": session.last_call_s,
        "metadata": session.settings.metadata,
        "calls": [
            {
                "state": str(call.state),
                "seconds": time.time() - call.recorder.started_s,
                "left_s": None if call.deadline is None else call.deadline - now_s,
            }
            for call in session.inflight
        ],
        "server": session.worker.config.url if session.worker is not None and session.inflight else None,
    }
