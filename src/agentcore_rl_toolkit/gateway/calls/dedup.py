"""Repeated requests, and replies that did not arrive.

A request is a repetition when the client says so (a retry count, an idempotency key): it gets the first one's reply and is
not recorded a second time. The same body alone proves nothing: agents sample the same prompt several times on purpose.
So a retry count may fit several calls. It is taken for the first of these that exists: a call whose agent hung up or did not
take the reply; a call that failed before its reply began (it is sampled anew; clients do not retry a call whose head they
have); the last call that was answered; a call whose agent still waits.

A reply counts as taken unless its connection ends before another request came on it, with one of these signs:

* The agent's system had not confirmed the last byte, or soon reset the connection behind a reply that was not streamed (a
  system does that for a program that leaves bytes unread). The agent does not have the reply, so no call continues it.
* It reset the connection behind a stream after it had got the finish reason. Agents that read no further do that, and agents
  that broke. A repeated request tells them apart: it is the retry of this call.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from typing import Any

from ...errors import CaptureError, GatewayError
from ..capture.record import TURNS, CallRecord, decode
from ..http.messages import LAST_CHUNK, hung_up
from ..sessions.session import REMEMBERED, RecordedReply, Session, repeats_of
from .agent import AgentSide
from .context import Context

log = logging.getLogger(__name__)

MEMORY_S = 600.0  # how long a call may be asked for again


@dataclass(slots=True, frozen=True)
class Earlier:
    """The call that a request repeats: one that runs (``running``), one that is recorded (``answer``, ``record``), or none.
    ``retry_of`` is the call that a new request replaces.
    """

    running: Any = None
    answer: RecordedReply | None = None
    record: CallRecord | None = None
    retry_of: str | None = None


NOTHING = Earlier()


def find(context: Context, session: Session, asked: AgentSide, *, again: bool, key: bool) -> Earlier:
    """Find the call that `asked` repeats. ``again``: the client says that it is a repetition. ``key``: it names the request,
    so no other can be meant.
    """
    known = session.recent.get(asked.digest) if session.recent else None
    if known is not None and known.lost:
        known.lost = [answer for answer in known.lost if not answer.old(MEMORY_S)]
    if not again:
        if known is not None and known.lost:
            return Earlier(retry_of=known.lost.pop(0).call_id)
        return NOTHING
    running = [call for call in session.inflight if _same(call.agent, asked)]
    left = [call for call in running if call.agent.conn is None or hung_up(call.agent.conn.transport)]
    answer: RecordedReply | None = None
    if not left and known is not None and known.lost:
        answer = known.lost.pop(0)
    elif not (left or key) and known is not None and known.failed:
        known.failed -= 1
        return NOTHING
    elif left or (running and (key or len(running) == 1)):
        return Earlier(running=(left or running)[0])
    elif known is not None and known.last is not None:
        answer = known.last
    else:
        answer = _stored(context, session, asked)
    if answer is None or answer.old(MEMORY_S):
        return NOTHING
    record = _read(context, session, answer.position)
    if record is None:
        return NOTHING
    if not answer.taken_by:
        context.sessions.took(session, answer.position, True)
    if session.recent is not None:
        repeats_of(session.recent, asked.digest).last = answer
    return Earlier(answer=answer, record=record)


def _same(one: AgentSide, other: AgentSide) -> bool:
    return (one.digest, one.dialect, one.stream) == (other.digest, other.dialect, other.stream)


def _stored(context: Context, session: Session, asked: AgentSide) -> RecordedReply | None:
    """The call's earlier attempt among the session's last ones, when this process did not answer it itself."""
    sessions = context.sessions
    if time.time() - context.started_s > MEMORY_S or not session.records:
        return None
    store = sessions.store
    try:
        last = store.reader.last_calls(session.number, REMEMBERED)
    except GatewayError as e:
        log.error("session %s: calls that may be asked for again cannot be read: %s", session.id, e)
        return None
    for position, digest, status, delivered in last:
        if position >= store.first_call or digest != asked.digest or status not in TURNS:
            continue
        record = _read(context, session, position)
        if record is None:
            continue
        if time.time() - record.finished_s > MEMORY_S:
            return None
        if record.dialect == asked.dialect:
            answer = RecordedReply(sessions.took, session, position, record.call_id, asked.digest)
            answer.taken_by = int(delivered)
            if not delivered:
                session.stored.undelivered.add(position)
            return answer
    return None


def _read(context: Context, session: Session, position: int) -> CallRecord | None:
    """A stored call. None: it is damaged, which is as if there were none."""
    try:
        return decode(context.sessions.store.reader.call(position))
    except (GatewayError, CaptureError) as e:
        log.error("session %s: a call that may be asked for again cannot be read: %s", session.id, e)
        return None


_END = re.compile(rb'"finish_reason"[ \n\r\t]*:[ \n\r\t]*"|data: ?\[DONE\]')


def behind_the_end(events: bytes) -> int:
    """How many last bytes of a stream an agent does not need: those behind its finish reason, in chat's dialect."""
    end = _END.search(events)
    after = -1 if end is None else events.find(b"\n\n", end.start())
    return len(LAST_CHUNK) + (len(events) - after - 2 if after >= 0 else 0)
