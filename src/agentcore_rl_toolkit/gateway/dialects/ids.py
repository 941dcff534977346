"""Ids that a dialect gives to a reply and its parts, made from the id of the reply.

Whoever is told a recorded reply once more is told the same ids, streamed or not: clients take an id that they know for a
message that they have.
"""

from __future__ import annotations

from .canonical import new_id

_OTHERS = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def own_id(prefix: str, reply_id: str, place: int | None = None) -> str:
    """The id, beginning with ``prefix``, of a reply, or of the part of it at ``place`` (counted from 0).

    A reply without an id gets a fresh one every time.
    """
    if not reply_id:
        return new_id(prefix)
    tail = reply_id
    for other in _OTHERS:
        tail = tail.removeprefix(other)
    return f"{prefix}{tail}" if place is None else f"{prefix}{tail}-{place}"
