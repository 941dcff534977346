"""The reply of a call: one buffer, and the connections that it is written on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from ..messages.errors import RequestError
from .sessions.session import RecordedReply


class Reply:
    """What an agent is to get.

    Nothing is added to ``buffer`` once it has ``ended``. ``error`` is why the agent gets no reply, or no more of it, and
    ``error_event`` is how a stream reports it; ``cut``: the reply did not end by itself. ``recorded`` is the stored reply, as the
    session remembers it. ``orphaned`` is called when the reply has had no connection for a while.
    """

    def __init__(self, orphaned: Callable[[], None] | None = None, orphan_s: float = 0.0) -> None:
        self.buffer = bytearray()
        self.ended = False
        self.error: RequestError | None = None
        self.error_headers: Mapping[str, str] | None = None
        self.error_event = b""
        self.cut = False
        self.recorded: RecordedReply | None = None
        self.connections = 0
        self.changed_s = time.monotonic()
        self._waiting: list[asyncio.Future[None]] = []
        self._orphaned = orphaned
        self._orphan_s = orphan_s
        self._timer: asyncio.TimerHandle | None = None

    def add(self, data: bytes) -> None:
        if data:
            self.buffer += data
            self.wake()

    def end(self) -> None:
        self.ended = True
        self._orphaned = None  # it holds the call, which holds the reply
        self.wake()

    def wake(self) -> None:
        """Let the connections write what is new, or a ping."""
        self.changed_s = time.monotonic()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def change(self) -> None:
        """Return when there is something to write."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def connect(self) -> None:
        """Another connection waits for the reply."""
        self.connections += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.recorded is not None:
            self.recorded.connections += 1

    def disconnect(self, *, whole: bool) -> None:
        """A connection has ended. ``whole``: the reply was written on it to the end."""
        self.connections -= 1
        if self.recorded is not None:
            self.recorded.sent(whole=whole)
        elif not self.connections and not self.ended and self._orphaned is not None:
            self._timer = asyncio.get_running_loop().call_later(self._orphan_s, self._orphaned)
