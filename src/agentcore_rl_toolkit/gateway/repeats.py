"""Requests that are sent again: they get the first one's reply and are not recorded a second time.

A request is a repetition when the client says so (a retry count, an idempotency key), or when the first one's reply
could not be delivered. The same body alone proves nothing: agents sample the same prompt several times on purpose.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .records import decode
from .wire import LAST_CHUNK, chunk, reply, stream_head

if TYPE_CHECKING:
    from .answering import Answering
    from .calls import Call

_REMEMBERED = 8  # answered calls per session that a repeated request may be joined to
_EVENT_STREAM = ((b"content-type", b"text/event-stream"),)


class Answered:
    """A recorded call that may be asked for again: where its record is, and whether its reply was written out."""

    __slots__ = ("delivered", "finished", "length", "position")

    def __init__(self, position: int, length: int, delivered: bool, finished: float) -> None:
        self.position = position
        self.length = length
        self.delivered = delivered
        self.finished = finished


def remember(call: Answering, *, delivered: bool) -> None:
    """Let a repetition of this request find its record; only the last few of a session are kept."""
    recent = call.session.recent
    if recent is None or call.captured is None or call.captured.problem is not None or not call.captured.complete:
        return
    recent[call.digest] = Answered(call.position, call.length, delivered, time.monotonic())
    recent.move_to_end(call.digest)
    if len(recent) > _REMEMBERED:
        recent.popitem(last=False)


def joins(call: Call, *, again: bool) -> bool:
    """Whether `call` repeats an earlier one; then it is answered from there, now or when that one ends.

    ``again``: the client says that it is a repetition.
    """
    conn = call.conn
    session = call.session
    if conn is None:
        return False
    recent = session.recent
    if again:
        for other in session.inflight:
            if other.digest == call.digest and other.dialect == call.dialect and other.stream == call.stream:
                call.conn, call.ended = None, True
                call.gateway.counters["turns_joined"] += 1
                other.take_over(conn, call.keep_alive)
                return True
    known = recent.get(call.digest) if recent else None
    if known is None or (known.delivered and not again):
        return False
    if time.monotonic() - known.finished > call.gateway.limits.retry_memory_s:
        return False
    record = decode(call.gateway.journal.read(known.position, known.length))
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
