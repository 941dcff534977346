"""Stopping sessions in the background: paced, retried, counted, and drained before the client closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from ...logs import WarnsOnceAMinute
from .pacing import Pacer, backoff_s
from .transport import InvokeRefusedError, InvokeUncertainError, Transport, in_thread, within

logger = logging.getLogger(__name__)

STOPS_AT_ONCE = 64  # at the default pace, stops of two seconds each keep up with it


async def take_turn(ask: Callable[[float], float]) -> None:
    """Wait until ``ask(now)`` of a pacer grants a slot. Asks at least once a second: other clients may change the pace."""
    while True:
        delay_s = ask(time.monotonic())
        if delay_s <= 0:
            return
        await asyncio.sleep(min(delay_s, 1.0))


class StopQueue:
    """Sessions to stop. Lives on the engine's loop.

    Attributes:
        left: sessions that are not known to be gone, in the order in which they came.
    """

    def __init__(self, transport: Transport, pacer: Pacer, stop_s: float) -> None:
        self._transport, self._pacer, self._stop_s = transport, pacer, stop_s
        self.left: dict[str, None] = {}
        self._gate = asyncio.Semaphore(STOPS_AT_ONCE)
        self._pace = asyncio.Lock()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._ended = asyncio.Event()  # of a stop
        self._hurry = asyncio.Event()
        self._stopped_s, self._given_up = 0.0, False  # when the last stop succeeded; whether one failed
        self._warnings = WarnsOnceAMinute(logger)

    def put(
        self, session_id: str, on_end: Callable[[bool], object], after: asyncio.Future[bytes] | None = None
    ) -> asyncio.Task[bool]:
        """Stop a session soon; not before `after` (its invoke, still on the wire) is over, or it might start after its stop.

        ``on_end(gone)`` is called afterwards: True when the session is known to be gone.
        """
        self.left[session_id] = None

        def ended(task: asyncio.Task[bool]) -> None:
            gone = not task.cancelled() and task.result()
            if gone:
                self.left.pop(session_id, None)
                self._stopped_s = time.monotonic()
            self._given_up = self._given_up or not gone
            self._tasks.discard(task)
            self._ended.set()
            on_end(gone)

        task = asyncio.create_task(self._stop(session_id, after))
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def drain(self) -> None:
        """Wait for all stops. Give up when one failed and none succeeded for `stop_s`: the pace may need longer for all."""
        self._stopped_s, self._given_up = time.monotonic(), False
        while self._tasks:
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_s / 2):
                    await self._ended.wait()
            quiet_s = time.monotonic() - self._stopped_s
            if quiet_s >= self._stop_s / 2:
                # Invokes that are still on the wire will not be waited for: their sessions are stopped on suspicion.
                self._hurry.set()
            if quiet_s >= self._stop_s and self._given_up:
                return

    async def _stop(self, session_id: str, after: asyncio.Future[bytes] | None) -> bool:
        """Whether the session is known to be gone."""
        if after is not None:
            hurry = asyncio.ensure_future(self._hurry.wait())
            either: set[asyncio.Future[Any]] = {after, hurry}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        spent_s, failures = 0.0, 0  # without the waits for a turn
        async with self._gate:
            while True:
                async with self._pace:
                    await take_turn(self._pacer.try_stop)
                began_s = time.monotonic()
                try:
                    await within(in_thread(self._transport.stop, session_id), self._stop_s - spent_s)
                    # With its invoke still on the wire the session may yet come up; a later process has to stop it again.
                    return after is None or after.done()
                except (InvokeRefusedError, InvokeUncertainError, TimeoutError) as e:
                    # Stopping twice does no harm, so an unclear answer is simply asked again.
                    if isinstance(e, InvokeRefusedError) and e.kind == "throttled":
                        self._pacer.stop_refused(time.monotonic())
                    failures += 1
                    pause_s = backoff_s(failures, base_s=0.25, cap_s=5.0, jitter=random.random())
                    problem: Exception = e
                except Exception as e:  # refused for good
                    pause_s, problem = self._stop_s, e
                spent_s += time.monotonic() - began_s + pause_s
                if spent_s > self._stop_s:
                    ids = {"session_id": session_id}
                    self._warnings.warning("session %s could not be stopped: %s", session_id, problem, extra=ids)
                    return False
                await asyncio.sleep(pause_s)
