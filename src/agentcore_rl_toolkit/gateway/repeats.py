"""Requests that are sent again: they get the first one's reply and are not recorded a second time.

A request is a repetition when the client says so (a retry count, an idempotency key), or when the first one's reply
could not be delivered. The same body alone proves nothing: agents sample the same prompt several times on purpose. For
the same reason a retry count does not say which of several calls is meant: first come those whose agent hung up, then
those that failed (the repetition of one is sampled anew), and one that is still waited for only if there is no other.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING

from ..errors import CaptureError, GatewayError
from .notes import NOWHERE
from .records import OK, UNTRAINABLE, CallRecord, decode
from .wire import LAST_CHUNK, chunk, hung_up, reply, stream_head

if TYPE_CHECKING:
    from .answering import Answering
    from .calls import Call

log = logging.getLogger(__name__)

_REMEMBERED = 64  # answered calls per session that a repeated request may be joined to
_EVENT_STREAM = ((b"content-type", b"text/event-stream"),)


class Answered:
    """The calls of one body that may be asked for again: where the last one's record is (-1: none ended well), whether
    its reply was written out, and how many failed since and were not asked for again.
    """

    __slots__ = ("delivered", "failed", "finished", "length", "position")

    def __init__(self, position: int, length: int, delivered: bool, finished: float, failed: int) -> None:
        self.position = position
        self.length = length
        self.delivered = delivered
        self.finished = finished
        self.failed = failed


def remember(call: Answering, *, delivered: bool) -> None:
    """Let a repetition of this request find its record; only the last few of a session are kept."""
    recent = call.session.recent
    if recent is None or call.captured is None or call.captured.problem is not None or not call.captured.complete:
        return
    before = recent.get(call.digest)
    if before is not None and delivered and not before.delivered:
        return  # the reply that was lost is the one that will be asked for
    failed = before.failed if before is not None else 0
    recent[call.digest] = Answered(call.position, call.length, delivered, time.monotonic(), failed)
    recent.move_to_end(call.digest)
    if len(recent) > _REMEMBERED:
        recent.popitem(last=False)


def failed(call: Answering) -> None:
    """The next repetition of this request is this call's, and a call of its own."""
    recent = call.session.recent
    if recent is None:
        return
    known = recent.get(call.digest)
    if known is None:
        known = recent[call.digest] = Answered(-1, 0, True, time.monotonic(), 0)
        if len(recent) > _REMEMBERED:
            recent.popitem(last=False)
    known.failed += 1


def digest_of(*parts: bytes) -> int:
    """A number for a request that is the same in every process: a repetition may come after a restart."""
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest(), "big", signed=True)


def _stored(call: Call) -> Answered | None:
    """The call's earlier attempt among the session's last ones, when this process did not answer it itself."""
    gateway, session = call.gateway, call.session
    since_s = time.time() - gateway.started_s
    if since_s > gateway.limits.retry_memory_s or not session.positions:
        return None
    frames = zip(session.positions[-_REMEMBERED:], session.lengths[-_REMEMBERED:], strict=True)
    for position, length in reversed(list(frames)):
        if position == NOWHERE or not length or position >= gateway.journal.own_from:
            continue
        record = _read(call, position, length)
        if record is None:
            continue
        if time.time() - record.finished_s > gateway.limits.retry_memory_s:
            return None
        if record.digest == call.digest and record.status in (OK, UNTRAINABLE) and record.dialect == call.dialect:
            return Answered(position, length, True, time.monotonic(), 0)
    return None


def _read(call: Call, position: int, length: int) -> CallRecord | None:
    """A stored call. None: it is damaged, which is as if there were none."""
    try:
        return decode(call.gateway.journal.read(position, length))
    except (GatewayError, CaptureError) as e:
        log.error("session %s: a call that may be asked for again cannot be read: %s", call.session.id, e)
        return None


def _forget(call: Call, known: Answered) -> None:
    """The record that a repetition asks for is damaged: it is answered anew, in the damaged call's stead."""
    known.position, known.delivered = -1, True
    call.session.started_turns -= 1
    call.session.forget_texts()


def joins(call: Call, *, again: bool, key: bool) -> bool:
    """Whether `call` repeats an earlier one; then it is answered from there, now or when that one ends.

    ``again``: the client says that it is a repetition. ``key``: it names the request, so that no other can be meant.
    """
    conn = call.conn
    session = call.session
    if conn is None:
        return False
    known = session.recent.get(call.digest) if session.recent else None
    if again:
        running = [
            other
            for other in session.inflight
            if other.digest == call.digest and other.dialect == call.dialect and other.stream == call.stream
        ]
        left = [other for other in running if other.conn is None or hung_up(other.conn.transport)]
        if not (left or key) and known is not None and known.failed:
            known.failed -= 1
            return False
        if left or key or len(running) == 1:
            for other in left or running:
                call.conn, call.ended = None, True
                call.gateway.counters["turns_joined"] += 1
                other.take_over(conn, call.keep_alive)
                return True
        if known is None:
            known = _stored(call)
    if known is None:
        return False
    if known.position < 0 or (known.delivered and not again):
        return False
    if time.monotonic() - known.finished > call.gateway.limits.retry_memory_s:
        return False
    record = _read(call, known.position, known.length)
    if record is None:
        _forget(call, known)
        return False
    call.gateway.counters["turns_joined"] += 1
    known.delivered = True
    call.conn, call.ended = None, True
    body = call.replayed(record)
    if call.stream:
        conn.write(stream_head(200, _EVENT_STREAM, keep_alive=call.keep_alive) + chunk(body) + LAST_CHUNK)
    else:
        conn.write(reply(200, body, keep_alive=call.keep_alive))
    conn.done(keep_alive=call.keep_alive)
    return True
