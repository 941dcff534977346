"""The recorded replies of a session by their ids, for requests that refer to items of them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ...errors import CaptureError, GatewayError
from ...messages.wire.canonical import own_id
from ..capture.record import decode
from .writer import Store

log = logging.getLogger(__name__)


class RecordedReplies:
    """The assistant messages of a session's replies. They are read from the store when a request first refers to one."""

    def __init__(self) -> None:
        self._messages: dict[str, dict[str, Any]] = {}
        self._last_number = -1

    def find(self, store: Store, session: int, reply_id: str) -> dict[str, Any] | None:
        """Return the message of a reply, by its id without the prefix of an API. None: the session has no such reply."""
        if reply_id not in self._messages:
            store.commit()  # only committed calls can be read
            for number in store.reader.numbers(session):
                if number > self._last_number:
                    self._last_number = number
                    self._read(store, number)
        return self._messages.get(reply_id)

    def _read(self, store: Store, number: int) -> None:
        try:
            record = decode(store.reader.call(number))
            if record.reply_id and record.choices:
                self._messages[own_id("", record.reply_id)] = msgspec.json.decode(record.choices[0].message)
        except (CaptureError, GatewayError, msgspec.DecodeError) as e:
            log.warning("call %d cannot be read, so no request can refer to it: %s", number, e)
