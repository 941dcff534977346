"""Stops the sessions of a client in the background, at the pace of their agent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from .._servers.tasks import Tasks
from ..logs import WarnsOnceAMinute
from ..store import backoff_s
from .ledger import FileLedger
from .pacing import Pacer, take_turn
from .transport import CallError, Transport, in_thread, within

logger = logging.getLogger(__name__)

STOPS_AT_ONCE = 64  # at the default pace, stops of two seconds each keep up with it


class Stops:
    """The sessions that have to be stopped. It lives on the client's loop.

    Attributes:
        left: ids of the sessions that are not known to have ended.
        counts: of the stops, as "stopped" and "stop_failed".

    Args:
        stop_s: the limit of one stop, without the waits for the pace.
        on_end: ``on_end(session_id, succeeded)`` is called after each stop.
    """

    def __init__(
        self, transport: Transport, pacer: Pacer, stop_s: float, on_end: Callable[[str, bool], object]
    ) -> None:
        self.left: dict[str, None] = {}
        self.counts: Counter[str] = Counter()
        self._transport, self._pacer, self._stop_s, self._on_end = transport, pacer, stop_s, on_end
        self._tasks = Tasks()
        self._places, self._pace = asyncio.Semaphore(STOPS_AT_ONCE), asyncio.Lock()
        self._hurry = asyncio.Event()  # stops no longer wait for the invokes of their sessions
        self._warnings = WarnsOnceAMinute(logger)

    def start(
        self, session_id: str, ledger: FileLedger, invoke: asyncio.Future[bytes] | None = None
    ) -> asyncio.Task[bool]:
        """Stop a session. If its invoke is still on the wire, the stop waits for the end or the first bytes of its reply."""
        self.left[session_id] = None
        return self._tasks.start(self._stop(session_id, ledger, invoke))

    async def drain(self) -> None:
        """Wait for all stops.

        Give up when one failed and none succeeded for `stop_s`. At a slow pace all stops may take longer than that.
        """
        failed, idle = self.counts["stop_failed"], 0
        while self._tasks:
            stopped = self.counts["stopped"]
            await asyncio.wait(self._tasks, timeout=self._stop_s / 2)
            idle = idle + 1 if self.counts["stopped"] == stopped else 0
            if idle:
                self._hurry.set()
            if idle >= 2 and self.counts["stop_failed"] > failed:
                return

    async def _stop(self, session_id: str, ledger: FileLedger, invoke: asyncio.Future[bytes] | None) -> bool:
        ended = False
        try:
            if invoke is not None and not invoke.done():  # the session might start after its stop
                hurry = asyncio.ensure_future(self._hurry.wait())
                await asyncio.wait((invoke, hurry), return_when=asyncio.FIRST_COMPLETED)
                hurry.cancel()
            async with self._places:
                ended = await self._send(session_id) and (invoke is None or invoke.done())
        finally:
            if ended:
                self.left.pop(session_id, None)
                ledger.note(session_id, event="stopped")
            self.counts["stopped" if ended else "stop_failed"] += 1
            self._on_end(session_id, ended)
        return ended

    async def _send(self, session_id: str) -> bool:
        """Send stop requests until one succeeds. Return False after `stop_s`."""
        spent_s, failures = 0.0, 0
        while True:
            async with self._pace:
                await take_turn(self._pacer.try_stop)
            began_s, failures = time.monotonic(), failures + 1
            pause_s = backoff_s(failures, first_s=0.25)
            try:
                await within(in_thread(self._transport.stop, session_id), self._stop_s - spent_s)
                return True
            except CallError as e:
                if e.throttled:
                    self._pacer.stop_refused(time.monotonic())
                error: Exception = e
            except TimeoutError as e:
                error = e
            except Exception as e:  # a further stop would fail, too
                error, pause_s = e, self._stop_s
            spent_s += time.monotonic() - began_s + pause_s
            if spent_s > self._stop_s:
                ids = {"session_id": session_id}
                self._warnings.warning("session %s could not be stopped: %s", session_id, error, extra=ids)
                return False
            await asyncio.sleep(pause_s)
