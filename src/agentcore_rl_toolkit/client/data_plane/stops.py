"""Stopping sessions in the background: paced, retried, counted, and drained before the client closes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ...logs import WarnsOnceAMinute
from .pacing import Pacer, backoff_s
from .transport import Ending, InvokeRefusedError, InvokeUncertainError, Transport, in_thread

logger = logging.getLogger(__name__)

STOPS_AT_ONCE = 16

INTERVAL_S = 0.5
SESSIONS_AT_ONCE = 5_000  # in one request; a runtime takes twice as many
LONGEST_PAUSE_S = 5.0  # between questions of which the last ones failed


class Endings:
    """The sessions that are waited for, and the question for them. Lives on the engine's loop."""

    def __init__(self, transport: Transport) -> None:
        self._source: Transport | None = transport  # None: it cannot say
        self._watched: dict[str, Callable[[Ending], Awaitable[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failures = 0

    def watch(self, session_id: str, on_end: Callable[[Ending], Awaitable[None]]) -> None:
        """``on_end(ending)`` is awaited with each answer that says that the session is over and gone, until `forget`."""
        if self._source is None:
            return
        self._watched[session_id] = on_end
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def forget(self, session_id: str) -> None:
        """It is not waited for any more."""
        self._watched.pop(session_id, None)

    def close(self) -> None:
        """Ask no more."""
        self._source = None
        self._watched.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S if not self._failures else backoff_s(self._failures, cap_s=LONGEST_PAUSE_S))
            names = list(self._watched)
            if not names or self._source is None:
                self._task = None  # before any other step: `watch` starts the next one
                return
            for first in range(0, len(names), SESSIONS_AT_ONCE):
                found = await self._ask(names[first : first + SESSIONS_AT_ONCE])
                for name, ending in found.items():
                    on_end = self._watched.get(name)
                    if on_end is not None and ending.gone:
                        await on_end(ending)

    async def _ask(self, names: Sequence[str]) -> Mapping[str, Ending]:
        if self._source is None:
            return {}
        try:
            found: Mapping[str, Ending] | None = await in_thread(self._source.endings, names)
        except Exception as e:  # it is asked again
            self._failures += 1
            logger.debug("the runtime did not say how sessions ended: %s", e)
            return {}
        self._failures = 0
        if found is None:
            self._source = None
            return {}
        return found


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
