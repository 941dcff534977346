"""Stores what became of a call: a turn, a failure, or a refused request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..errors import CaptureError
from ..messages.errors import RequestError
from .capture.build import build
from .capture.record import (
    ABORTED,
    ERROR,
    INVALID,
    LOST_WEIGHTS,
    OK,
    PARTIAL,
    REFUSED,
    TURNS,
    UNTRAINABLE,
    CallRecord,
    Captured,
)
from .capture.versions import bounds
from .context import Context
from .engine import Engine
from .sessions.session import RecordedReply

if TYPE_CHECKING:
    from .call import Call

AGENT_GONE = "agent_gone"  # the code of the error of a call whose agent hung up
_FEW = 3  # running calls up to which waiting for others to commit with would only be waiting
_MOST_REFUSED = 50  # requests of one session that are entries of it: an agent may repeat one forever


async def store_reply(call: Call, engine: Engine, context: Context) -> tuple[CallRecord, Captured]:
    """Store a complete reply. Raises: RequestError when the disk refuses it."""
    try:
        captured = engine.captured()
    except CaptureError as e:
        captured = Captured(choices=[], complete=True, problem=str(e))
    status = _status(captured, context.engine)
    if call.worker is not None and call.worker.forgot:
        captured.untrainable = LOST_WEIGHTS
    record = _build(call, status, captured)
    is_turn = status in TURNS
    error = await _committed(call, record, context)
    call.stored = True
    session = call.session
    if error is None and is_turn:
        session.turns += 1
        context.sessions.turns += 1
    else:
        session.errors += 1
        session.started_turns -= 1
    if not is_turn:
        context.counters["turns_" + status] += 1
    if error is not None:
        context.counters["store_failures"] += 1
        raise RequestError("the gateway could not store this call; try again", kind="overloaded")
    return record, captured


def _status(captured: Captured, engine: str) -> str:
    if captured.error is not None or not captured.complete:
        return PARTIAL
    if captured.problem is not None:
        return INVALID
    if captured.has_tokens:
        return OK
    if engine == "openai":
        return UNTRAINABLE
    captured.problem = "the engine returned no token ids; it must honour return_token_ids (vLLM does since 0.10.2)"
    return INVALID


async def _committed(call: Call, record: CallRecord, context: Context) -> OSError | None:
    """Return when the record is committed, or why it is not. The records of a closed session are not kept."""
    session, store = call.session, context.sessions.store
    if session.closed:
        return None
    committed: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()

    def done(error: OSError | None) -> None:
        if not committed.done():
            committed.set_result(error)

    session.append()
    position = store.append(session, record, done, alone=len(context.running) <= _FEW)
    error = await committed
    if error is None and record.status in TURNS:
        call.recorded = RecordedReply(context.sessions.deliver, session, position, connections=call.connections)
        session.repeats_of(record.digest).add(call.recorded)
    return error


def store_failure(call: Call, error: RequestError, kind: str, context: Context) -> None:
    """Store a failed call as an event of the session, never as a turn. ``kind`` is the name of the error."""
    session, begun = call.session, bool(call.reply)
    session.started_turns -= 1
    status = PARTIAL if begun else ERROR
    if error.code == AGENT_GONE:
        status = ABORTED
    context.counters["turns_" + status] += 1
    if session.recent is not None and not begun:  # clients that have the head of a reply do not try again
        session.repeats_of(call.request.digest).failed += 1
    _store_error(call, status, error, kind, str(error), context)


def store_refusal(call: Call, error: RequestError, context: Context) -> None:
    """Store a request that never became a call: when it was, its status, the field at fault and why."""
    session = call.session
    context.counters["refused"] += 1
    if session.closed or session.refused >= _MOST_REFUSED:
        return
    session.refused += 1
    call.call_id, call.index = next(context.call_ids), session.next_index
    session.next_index += 1
    call.request.fields, call.request.long = {}, None
    if error.kind == "internal":
        _store_error(call, ERROR, error, error.kind, str(error), context)
    else:
        _store_error(call, REFUSED, error, error.kind, f"{error.param or ''}: {error}", context)


def _store_error(call: Call, status: str, error: RequestError, kind: str, message: str, context: Context) -> None:
    session = call.session
    session.errors += 1
    if session.closed:
        return
    record = _build(call, status, Captured(choices=[]))
    record.http_status, record.error_type, record.error = error.status or 500, kind, message[:4000]
    session.append()
    context.sessions.store.append(session, record)


def _build(call: Call, status: str, captured: Captured) -> CallRecord:
    request, worker, long = call.request, call.worker, call.request.long
    return build(
        status,
        captured,
        texts=call.session.texts,
        fields=request.fields,
        long=None if long is None else (long.text, long.crc, long.seen),
        versions=bounds(captured, *call.versions, changed=call.changed, stream=request.stream),
        call_id=call.call_id,
        index=call.index,
        dialect=request.dialect,
        started_s=call.started_s,
        first_token_s=call.first_token_s,
        digest=request.digest,
        upstream=None if worker is None else worker.id,
    )
