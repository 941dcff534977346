"""Translates long requests whose dialect is not the servers', turn after turn.

Reading a history of half a megabyte, checking and translating its messages and writing them out again takes ten times as
long as relaying it. Most requests continue an earlier one: then only the new messages are translated, and put behind the
translation of the known ones.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from ...messages.dialects import Dialect, ModelRequest, RequestError
from ..capture.prefix_index import Prefixes, Seen
from .incremental import LongRequest

LISTS = {"chat": "messages", "anthropic": "messages", "responses": "input"}  # the member with the history, by dialect
_LEADS = {"anthropic": "system", "responses": "instructions"}  # what becomes the first message
_ABSENT = msgspec.Raw(b"null")
_to_json = msgspec.json.Encoder().encode

Messages = list[dict[str, Any]]


class Translated(Seen):
    """A list in the agent's own dialect, and what it means.

    ``messages`` are canonical (None: no longer in memory), ``own`` of them stand for ``lead``, a member beside the list;
    ``sent`` is their JSON without the closing bracket, ``sent_crc`` its CRC-32.
    """

    __slots__ = ("lead", "messages", "own", "sent", "sent_crc")

    def __init__(
        self,
        text: bytes,
        crc: int,
        *,
        lead: bytes,
        own: int,
        messages: Messages,
        sent: bytes,
        sent_crc: int,
    ) -> None:
        super().__init__(text, "", 0, crc=crc)
        self.lead = lead
        self.own = own
        self.messages: Messages | None = messages
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
    translated = Translated(
        request.text, request.crc, lead=lead, own=own, messages=asked.messages, sent=sent, sent_crc=crc
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
