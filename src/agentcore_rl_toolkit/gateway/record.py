"""Stores the result of a call: a turn, a failure, or a refused request."""

from __future__ import annotations

import asyncio
import time

import msgspec

from ..messages.errors import RequestError
from .capture import record as kinds
from .capture.build import complete, pack_long_prompt
from .capture.record import LEFT_OUT, TAG, TURNS, CallRecord, Captured
from .context import Context
from .engines.errors import event_error
from .http.request import LARGE_BYTES, CallRequest
from .sessions import RecordedReply, Session

AGENT_GONE = "agent_gone"  # the error code of a call whose agent disconnected
_MOST_REFUSED = 50  # refused requests that a session records: an agent may repeat one forever
_NO_TOKENS = "the engine returned no token ids; it must support return_token_ids (vLLM 0.11 and later)"


class Recorder:
    """Stores the ``record`` of one call, which has the known facts from the beginning of the call on.

    ``reply`` is the call's reply for requests that repeat it.
    """

    def __init__(self, context: Context, session: Session, request: CallRequest) -> None:
        self._context = context
        self._session = session
        self._request = request
        self.published: tuple[int | None, int | None] = (None, None)  # versions at the start and at the end of sampling
        self.lost_weights = False  # the server has not the published weights
        fields = {name: value for name, value in request.fields.items() if name != "messages"}
        fields |= {LEFT_OUT: request.left_out} if request.left_out else {}
        fields |= {TAG: request.tag} if request.tag else {}
        self.record = CallRecord(
            call_id=f"{context.run_id}-{next(context.numbers):x}",
            index=session.next_index,
            status=kinds.ERROR,
            dialect=request.dialect,
            started_s=time.time(),
            finished_s=0.0,
            digest=request.digest,
            request=msgspec.json.encode(fields) if fields else b"",
        )
        session.next_index += 1
        self.reply = RecordedReply(session, request.digest)

    async def store_reply(self, captured: Captured, *, begun: bool) -> RequestError | None:
        """Store a reply. Returns the error that the agent gets instead, or instead of the reply's end.

        ``begun``: a part was sent already. The records of a closed session are not kept.

        Raises: RequestError when the disk refuses it.
        """
        session, context, record = self._session, self._context, self.record
        record.status = kinds.OK
        if self.lost_weights:
            captured.untrainable = kinds.LOST_WEIGHTS
        failure = None if captured.error is None else event_error(captured.error)
        if failure is None and not (captured.complete and captured.choices):
            begins = self._request.stream or captured.choices
            why = "the engine ended its reply too early" if begins else "the engine answered 200 without a reply"
            failure = RequestError(": ".join(filter(None, (why, captured.problem))), kind="upstream")
        if failure is not None:
            record.status, record.error_type, record.error = kinds.PARTIAL, failure.kind, str(failure)
            record.http_status = failure.status or 502
        elif captured.problem is not None:
            record.status = kinds.INVALID
        elif not captured.has_tokens and context.engine == "openai":
            record.status = kinds.UNTRAINABLE
        elif not captured.has_tokens:
            record.status, captured.problem = kinds.INVALID, _NO_TOKENS
        if captured.prompt_ids is None and len(captured.prompt or b"") >= LARGE_BYTES:
            await asyncio.to_thread(pack_long_prompt, session.texts, captured)
        self._complete(captured)
        if session.closed_s is not None:
            return failure
        number = session.store.append(session, record)
        refused = await session.store.kept()
        if refused is None and record.status in TURNS:
            session.turns += 1
            context.sessions.turns += 1
            self.reply.position = number
            session.keep(self.reply)
            return None
        session.errors += 1
        session.started_turns -= 1
        if not begun:  # the agent gets an error, and may repeat this call
            session.keep(self.reply)
        if record.status not in TURNS:
            context.counters["turns_" + record.status] += 1
        if refused is not None:
            context.counters["store_failures"] += 1
            raise RequestError("the gateway could not store this call; try again", kind="overloaded")
        return failure

    def store_failure(self, error: RequestError, *, begun: bool) -> None:
        """Store a failed call as an event of the session, never as a turn."""
        session, record = self._session, self.record
        if record.finished_s:
            return  # the reply is in the store
        session.started_turns -= 1
        record.status = kinds.ABORTED if error.code == AGENT_GONE else kinds.PARTIAL if begun else kinds.ERROR
        self._context.counters["turns_" + record.status] += 1
        if not begun:  # clients that have the head of a reply do not retry
            session.keep(self.reply)
        self._store_error(error, str(error))

    def store_refusal(self, error: RequestError) -> None:
        """Store a refused request: its time, its status, the field at fault and the reason."""
        if self._session.refused >= _MOST_REFUSED:
            return
        self._session.refused += 1
        if error.kind == "internal":
            self._store_error(error, str(error))
        else:
            self.record.status = kinds.REFUSED
            self._store_error(error, f"{error.param or ''}: {error}")

    def _store_error(self, error: RequestError, message: str) -> None:
        session, record = self._session, self.record
        if session.closed:
            return
        session.errors += 1
        self._complete(Captured(choices=[]))
        record.http_status, record.error = error.status or 500, message[:4000]
        record.error_type = AGENT_GONE if error.code == AGENT_GONE else error.kind
        session.store.append(session, record)

    def _complete(self, captured: Captured) -> None:
        request = self._request
        messages, texts = request.fields.get("messages", b""), self._session.texts
        complete(self.record, captured, messages, texts, published=self.published, stream=request.stream)
