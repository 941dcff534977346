"""The recorded replies of a session by their ids, for requests that refer to items of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from ...errors import CaptureError, GatewayError
from ...messages.wire.canonical import own_id
from ..capture.record import decode
from .reader import Reader
from .writer import Store

log = logging.getLogger(__name__)


class RecordedReplies:
    """The assistant messages of a session's replies. They are read from the store when a request first refers to one."""

    def __init__(self) -> None:
        self._messages: dict[str, dict[str, Any]] = {}
        self._last_number = 0

    def find(self, reply_id: str) -> dict[str, Any] | None:
        """Return the message of a reply, by its id without the prefix of an API. None: the session has no such reply."""
        return self._messages.get(reply_id)

    async def update(self, store: Store, session: int) -> None:
        """Read the calls that were stored since the last update, in a thread: they may be all calls of a long session."""
        store.commit()  # only committed calls can be read
        await asyncio.to_thread(self._read, store.for_threads, session)

    def _read(self, reader: Reader, session: int) -> None:
        for number in reader.numbers(session):
            if number > self._last_number:
                try:
                    record = decode(reader.call(number))
                    if record.reply_id and record.choices:
                        message = msgspec.json.decode(record.choices[0].message)
                        self._messages[own_id("", record.reply_id)] = message
                except (CaptureError, GatewayError, msgspec.DecodeError) as e:
                    log.warning("call %d cannot be read, so no request can refer to it: %s", number, e)
                self._last_number = number
