"""Stores the result of a call: a turn, a failure, or a refused request."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from ..errors import CaptureError
from ..logs import WarnsOnceAMinute
from ..messages.errors import RequestError
from .capture import record as kinds
from .capture.build import build, pack_long_prompt
from .capture.record import LEFT_OUT, TAG, TURNS, CallRecord, Captured
from .context import Context, Engine
from .http.request import LARGE_BYTES, CallRequest
from .router import Worker
from .sessions import Session

log = logging.getLogger(__name__)
_images = WarnsOnceAMinute(log)

AGENT_GONE = "agent_gone"  # the error code of a call whose agent disconnected
_MOST_REFUSED = 50  # refused requests that a session records: an agent may repeat one forever


class Recorder:
    """Stores the record of one call, and holds the facts for it."""

    def __init__(self, context: Context, session: Session, request: CallRequest) -> None:
        self._context = context
        self._session = session
        self._request = request
        self.call_id = f"{context.run_id}-{next(context.numbers):x}"
        self.index = session.next_index
        session.next_index += 1
        self.started_s = time.time()
        self.first_token_s: float | None = None
        self.worker: Worker | None = None
        self.versions: tuple[int | None, int | None] = (None, None)  # published at the start and at the end of sampling
        self._stored = False
        fields = dict(request.fields)
        self._messages = fields.pop("messages", b"")
        fields |= {LEFT_OUT: request.left_out} if request.left_out else {}
        fields |= {TAG: request.tag} if request.tag else {}
        self._fields = msgspec.json.encode(fields) if fields else b""

    async def store_reply(self, engine: Engine, *, begun: bool) -> tuple[CallRecord, Captured, int | None]:
        """Store a complete reply. ``begun``: a part was sent already.

        Returns: its record, its content, and its number in the store if it is a turn. The records of a closed session are not
        kept. Raises: RequestError when the disk refuses it.
        """
        session, context = self._session, self._context
        try:
            captured = engine.captured()
        except CaptureError as e:
            captured = Captured(choices=[], complete=True, problem=str(e))
        status = kinds.OK
        if captured.error is not None or not captured.complete:
            status = kinds.PARTIAL
        elif captured.problem is not None:
            status = kinds.INVALID
        elif not captured.has_tokens and context.engine == "openai":
            status = kinds.UNTRAINABLE
        elif not captured.has_tokens:
            captured.problem = (
                "the engine returned no token ids; it must support return_token_ids (vLLM 0.10.2 and later)"
            )
            status = kinds.INVALID
        if self.worker is not None and self.worker.forgot:
            captured.untrainable = kinds.LOST_WEIGHTS
        if len(captured.prompt or b"") >= LARGE_BYTES:
            await asyncio.to_thread(pack_long_prompt, session.texts, captured)
        record = self._build(status, captured)
        if captured.untrainable == kinds.IMAGES:
            why = "session %s sends images or sound, which the trainer does not get: such calls are recorded and not trained"
            _images.warning(why, session.id)
        number, error = None, None
        if session.closed_s is None:
            number = self._append(record)
            error = await session.store.kept()
        self._stored = True
        if error is None and status in TURNS:
            session.turns += 1
            context.sessions.turns += 1
            return record, captured, number
        session.errors += 1
        session.started_turns -= 1
        if not begun:  # the agent gets an error, and may repeat this call
            session.add_reply(record.digest, None)
        if status not in TURNS:
            context.counters["turns_" + status] += 1
        if error is not None:
            context.counters["store_failures"] += 1
            raise RequestError("the gateway could not store this call; try again", kind="overloaded")
        return record, captured, None

    def store_failure(self, error: RequestError, kind: str, *, begun: bool) -> None:
        """Store a failed call as an event of the session, never as a turn. ``kind`` is the name of the error."""
        if self._stored:
            return
        session = self._session
        session.started_turns -= 1
        status = kinds.ABORTED if error.code == AGENT_GONE else kinds.PARTIAL if begun else kinds.ERROR
        self._context.counters["turns_" + status] += 1
        if not begun:  # clients that have the head of a reply do not retry
            session.add_reply(self._request.digest, None)
        self._store_error(status, error, kind, str(error))

    def store_refusal(self, error: RequestError) -> None:
        """Store a refused request: its time, its status, the field at fault and the reason."""
        session = self._session
        if session.closed or session.refused >= _MOST_REFUSED:
            return
        session.refused += 1
        if error.kind == "internal":
            self._store_error(kinds.ERROR, error, error.kind, str(error))
        else:
            self._store_error(kinds.REFUSED, error, error.kind, f"{error.param or ''}: {error}")

    def _store_error(self, status: str, error: RequestError, kind: str, message: str) -> None:
        session = self._session
        session.errors += 1
        if session.closed:
            return
        record = self._build(status, Captured(choices=[]))
        record.http_status, record.error_type, record.error = error.status or 500, kind, message[:4000]
        self._append(record)

    def _append(self, record: CallRecord) -> int:
        session = self._session
        session.records += 1
        session.last_call_s = record.finished_s
        return session.store.append(session, record)

    def _build(self, status: str, captured: Captured) -> CallRecord:
        request = self._request
        return build(
            status,
            captured,
            texts=self._session.texts,
            messages=self._messages,
            fields=self._fields,
            published=self.versions,
            stream=request.stream,
            call_id=self.call_id,
            index=self.index,
            dialect=request.dialect,
            started_s=self.started_s,
            first_token_s=self.first_token_s,
            digest=request.digest,
            upstream=None if self.worker is None else self.worker.id,
        )
