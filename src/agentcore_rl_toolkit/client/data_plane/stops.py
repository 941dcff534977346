"""Stopping sessions in the background: paced, retried, counted, and drained before the client closes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from ...logs import WarnsOnceAMinute
from .pacing import Pacer, backoff_s
from .transport import InvokeRefusedError, InvokeUncertainError, Transport, in_thread

logger = logging.getLogger(__name__)

STOPS_AT_ONCE = 16


async def take_turn(ask: Callable[[float], float]) -> None:
    """Wait until ``ask(now)`` of a pacer grants a slot. Asks at least once a second: other clients may change the pace."""
    while True:
        delay_s = ask(time.monotonic())
        if delay_s <= 0:
            return
        await asyncio.sleep(min(delay_s, 1.0))


class StopQueue:
    """Sessions to stop. Lives on the engine's loop."""

    def __init__(self, transport: Transport, pacer: Pacer, stop_s: float) -> None:
        self._transport = transport
        self._pacer = pacer
        self._stop_s = stop_s
        self._gate = asyncio.Semaphore(STOPS_AT_ONCE)
        self._pace = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        self._warnings = WarnsOnceAMinute(logger)

    def put(
        self,
        session_id: str,
        on_end: Callable[[bool], object],
        after: asyncio.Future[bytes] | None = None,
    ) -> asyncio.Task[None]:
        """Stop a session soon; not before `after` (its invoke, still on the wire) is over, or it might start after its stop.

        ``on_end(gone)`` is called afterwards: True when the session is known to be gone.
        """

        async def stop() -> None:
            on_end(await self._stop(session_id, after))

        task = asyncio.create_task(stop())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, timeout_s: float) -> bool:
        """Wait for all stops; False if some were still open after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s / 2)
        if self._tasks:
            # Invokes that are still on the wire will not be waited for: their sessions are stopped on suspicion.
            self._hurry.set()
            await asyncio.wait(set(self._tasks), timeout=timeout_s / 2)
        self._warnings.end("%d more sessions could not be stopped and run until their idle timeout")
        return not self._tasks

    async def _stop(self, session_id: str, after: asyncio.Future[bytes] | None) -> bool:
        """Whether the session is known to be gone."""
        if after is not None and not after.done():
            hurry = asyncio.ensure_future(self._hurry.wait())
            either: set[asyncio.Future[Any]] = {after, hurry}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        deadline_s = time.monotonic() + self._stop_s
        failures = 0
        async with self._gate:
            while True:
                async with self._pace:
                    await take_turn(self._pacer.try_stop)
                try:
                    await in_thread(self._transport.stop, session_id)
                    # With its invoke still on the wire the session may yet come up; a later process has to stop it again.
                    return after is None or after.done()
                except (InvokeRefusedError, InvokeUncertainError) as e:
                    # Stopping twice does no harm, so an unclear answer is simply asked again.
                    if isinstance(e, InvokeRefusedError) and e.kind == "throttled":
                        self._pacer.stop_refused(time.monotonic())
                    failures += 1
                    pause_s = backoff_s(failures, base_s=0.25, cap_s=5.0, jitter=random.random())
                    problem: Exception = e
                except Exception as e:  # refused for good
                    pause_s, problem = self._stop_s, e
                if time.monotonic() + pause_s > deadline_s:
                    self._warnings.warning(
                        "session %s could not be stopped and runs until its idle timeout: %s",
                        session_id,
                        problem,
                        extra={"session_id": session_id},
                    )
                    return False
                await asyncio.sleep(pause_s)
