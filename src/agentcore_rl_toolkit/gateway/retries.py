"""Decides when a request repeats an earlier one of its session.

An idempotency key identifies its call. Without a key the first rule that applies decides for a request with the same body:

1. It joins a running call whose connection has ended.
2. It gets a recorded reply that no agent has received whole.
3. With a retry count it gets a received reply that is at most ten minutes old, unless a call with this body failed before its
   reply began: then the repetition is of that call, which is sampled again.
4. It is a separate sample: agents sample one prompt several times on purpose.

A reply is received when its last write was drained before any disconnect. A request for token ids or logprobs gets no
recorded reply, because records make replies without these numbers.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from ..errors import CaptureError, GatewayError, UpstreamError
from .call import Call
from .capture.record import TURNS, decode
from .context import Context
from .http.request import CallRequest
from .sessions import REMEMBERED, RecordedReply, Session

log = logging.getLogger(__name__)

MEMORY_S = 600.0  # the time in which a request may repeat a received reply


def running_call(session: Session, request: CallRequest) -> Call | None:
    """Return the running call that a request joins."""
    call: Call
    for call in session.inflight:
        if call.request.digest == request.digest and (request.keyed or not call.reply.connections) and not call.ending:
            return call
    return None


def recorded_call(context: Context, session: Session, request: CallRequest) -> Call | None:
    """Return an earlier call with the recorded reply that a request gets.

    A record that cannot be read or written counts as none.
    """
    recent = session.recent
    if recent is None:
        recent = session.recent = _recalled(session)
    calls = [call for call in recent if call.digest == request.digest]
    stored = [call for call in calls if call.position is not None]
    failed = next((call for call in calls if call.position is None), None)
    lost = next((call for call in stored if not (call.received or call.connections)), None)
    if lost is None and not request.keyed:
        if not request.again:
            return None
        if failed is not None:
            recent.remove(failed)
            return None
    reply = lost or (stored[-1] if stored else None)
    if reply is None or reply.position is None or request.numbers:
        return None
    try:
        record = decode(session.store.reader.call(reply.position))
        if lost is None and not request.keyed and time.time() - record.finished_s > MEMORY_S:
            return None
        engine = context.new_engine(session, request)
        call = Call(engine, reply)
        call.add(engine.replayed(record), ended=True)
        return call
    except (GatewayError, CaptureError, UpstreamError) as e:
        log.error("session %s: the call that a request repeats is sampled again: %s", session.id, e)
        recent.remove(reply)
        return None


def _recalled(session: Session) -> deque[RecordedReply]:
    """Read the last calls of the session that an earlier process answered."""
    found = deque[RecordedReply](maxlen=REMEMBERED)
    try:
        last = session.store.reader.last_calls(session.number, REMEMBERED)
    except GatewayError as e:
        log.error("session %s: calls that requests may repeat cannot be read: %s", session.id, e)
        return found
    for position, digest, status, delivered in reversed(last):
        if status in TURNS:
            found.append(RecordedReply(session, digest, position, received=delivered, delivered=delivered))
    return found
