"""Reads long requests, whose messages are those of an earlier request and a few more.

Decoding half a megabyte of history, writing it out again and hashing it would be most of the cost of a late turn. Bytes that
an earlier request had too are only compared (memory speed); the rest is decoded as if the history were not there.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from ...messages.errors import NOT_JSON
from ...messages.wire import Dialect, ModelRequest, RequestError
from ...messages.wire.passthrough import Fields
from ..capture.prefix_index import Prefixes, Seen

LONG = 32 * 2**10  # bytes of request body from which this is worth its bookkeeping
_KEYS = {name: b'"%b":[' % name.encode() for name in ("messages", "input")}
_NEAR = 4096  # clients write the messages first, or after a few short fields
decoded = msgspec.json.Decoder(Fields).decode  # the members of a request
_to_json = msgspec.json.Encoder().encode
LISTS = {"chat": "messages", "anthropic": "messages", "responses": "input"}  # the member with the history, by dialect
_LEADS = {"anthropic": "system", "responses": "instructions"}  # what becomes the first message
_ABSENT = msgspec.Raw(b"null")

Messages = list[dict[str, Any]]


class Translated(Seen):
    """A list in the agent's own dialect, and what it means.

    ``messages`` are canonical (None: no longer in memory), ``own`` of them stand for ``lead``, a member beside the list;
    ``sent`` is their JSON without the closing bracket, ``sent_crc`` its CRC-32.
    """

    __slots__ = ("lead", "left_out", "messages", "own", "sent", "sent_crc")

    def __init__(
        self,
        text: bytes,
        crc: int,
        *,
        lead: bytes,
        own: int,
        messages: Messages,
        left_out: dict[str, int],
        sent: bytes,
        sent_crc: int,
    ) -> None:
        super().__init__(text, "", 0, crc=crc)
        self.lead = lead
        self.own = own
        self.messages: Messages | None = messages
        self.left_out = left_out
        self.sent = sent
        self.sent_crc = sent_crc

    def fold(self) -> None:
        super().fold()
        self.messages, self.sent = None, b""
        self.length = sys.maxsize  # no text begins with it any more


def translate(
    request: LongRequest, known: Prefixes, speaks: Dialect, as_sent: Callable[[Messages], Messages]
) -> tuple[ModelRequest, LongRequest]:
    """The request, and its canonical messages as JSON; ``known`` learns it. ``as_sent`` gives messages the form in which
    the server, and the record, has them: each by itself.

    Raises: RequestError that names the field.
    """
    lead = bytes(request.fields.get(_LEADS.get(speaks.name, ""), _ABSENT))
    before = request.seen if isinstance(request.seen, Translated) else None
    asked = None if before is None else _translate_new(request, before, lead, speaks)
    if asked is None or before is None or before.messages is None:
        asked = speaks.parse_request(request.body)
        own = asked.lead
        sent = _to_json(as_sent(asked.messages))[:-1]
        crc = zlib.crc32(sent)
    else:
        own = before.own
        more = b",%b" % _to_json(as_sent(asked.messages))[1:-1]
        sent, crc = before.sent + more, zlib.crc32(more, before.sent_crc)
        asked.messages = before.messages + asked.messages
        asked.left_out = Counter(before.left_out) + Counter(asked.left_out)
    translated = Translated(
        request.text,
        request.crc,
        lead=lead,
        own=own,
        messages=asked.messages,
        left_out=asked.left_out,
        sent=sent,
        sent_crc=crc,
    )
    known.add(translated, instead_of=request.seen)
    return asked, LongRequest({}, sent, crc)


def _translate_new(request: LongRequest, before: Translated, lead: bytes, speaks: Dialect) -> ModelRequest | None:
    """The request with its new messages alone; None where those cannot be separated from those before."""
    # Items of the model are joined to one message, so new ones might belong to a last one of its.
    if before.messages is None or before.lead != lead or before.messages[-1]["role"] == "assistant":
        return None
    try:
        asked = speaks.parse_request(request.read)
    except RequestError:
        return None  # reading the whole request tells where
    del asked.messages[: before.own]
    return asked if asked.messages else None


def digest_of(*parts: bytes) -> int:
    """A number for a request that is the same in every process: a repetition may come after a restart."""
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest(), "big", signed=True)


class LongRequest:
    """A request in two parts. ``fields`` are all but the messages.

    ``text`` is the JSON of the message list without its closing bracket, ``crc`` its CRC-32; ``read`` is the part of
    ``body`` that was decoded; ``seen`` what the text was found to begin with.
    """

    __slots__ = ("body", "crc", "fields", "read", "seen", "text")

    def __init__(
        self, fields: Fields, text: bytes, crc: int, *, body: bytes = b"", read: bytes = b"", seen: Seen | None = None
    ) -> None:
        self.body = body
        self.fields = fields
        self.text = text
        self.crc = crc
        self.read = read
        self.seen = seen

    def digest(self) -> int:
        """The same for the same request, however much of it was known before."""
        return digest_of(b"%d %d " % (self.crc, len(self.text)), _to_json(self.fields))

    def pieces(self, fields: Fields) -> tuple[bytes, ...]:
        """The request with other fields, in pieces: the history is not copied once more to be sent."""
        rest = _to_json(fields)
        return b'{"messages":', self.text, (b"]," if len(rest) > 2 else b"]") + rest[1:]


def digest_of_body(body: bytes) -> int:
    """The same for the same request."""
    if len(body) < LONG:
        return digest_of(body)
    return digest_of(b"%d %d " % (zlib.crc32(body), len(body)), body[:_NEAR], body[-_NEAR:])


def understand(body: bytes, known: Prefixes, name: str = "messages") -> LongRequest | None:
    """The request in two parts, or None when it has no list of messages, which are its member `name`.

    Raises: msgspec.DecodeError, RecursionError when it is not a JSON object.
    """
    found = _continued(body, known, name)
    if found is not None:
        return found
    fields = decoded(body)
    messages = fields.pop(name, None)
    if messages is None:
        return None
    text = bytes(messages)
    if text[:1] != b"[":
        return None
    return LongRequest(fields, text[:-1], zlib.crc32(text[:-1]), body=body, read=body)


def _continued(body: bytes, known: Prefixes, name: str) -> LongRequest | None:
    """The request, when its messages begin with some that were seen before."""
    key = _KEYS[name]
    at = body.find(key, 0, _NEAR)
    if at < 0:
        return None
    start = at + len(key) - 1
    seen = known.longest(body, start)
    if seen is None:
        return None
    end = start + seen.length
    goes_on = body[end : end + 1] == b","
    read = b"%b[%b" % (body[:start], body[end + 1 :] if goes_on else body[end:])
    try:
        decoded(body[:at] + b'"":0}')  # so it is a key of the request and not of something inside it
        fields = decoded(read)
    except NOT_JSON:
        return None  # reading the whole request tells what is wrong
    new = bytes(fields.pop(name, msgspec.Raw(b"")))
    if read[start : start + len(new)] != new or new[:1] != b"[" or (new == b"[]") is goes_on:
        return None
    text = body[start : end + len(new) - 1 if goes_on else end]
    return LongRequest(fields, text, zlib.crc32(text[seen.length :], seen.crc), body=body, read=read, seen=seen)
