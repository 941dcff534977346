"""Asks a local runtime which sessions have ended, and why: the client learns of a dead session in a second.

AWS has no such route and is never asked. Another data plane is asked once, and not again if it has no such route or refuses
this client (403). One request covers all sessions in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ...errors import AgentCoreRLError
from .pacing import backoff_s
from .transport import Ending, Transport, in_thread

logger = logging.getLogger(__name__)

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
                        await self._tell(name, on_end, ending)

    async def _tell(self, name: str, on_end: Callable[[Ending], Awaitable[None]], ending: Ending) -> None:
        try:
            await on_end(ending)
        except Exception:  # of one session: the endings of the others are still asked for
            logger.exception("the end of a session could not be taken up", extra={"session_id": name})

    async def _ask(self, names: Sequence[str]) -> Mapping[str, Ending]:
        if self._source is None:
            return {}
        try:
            found: Mapping[str, Ending] | None = await in_thread(self._source.endings, names)
        except Exception as e:  # it is asked again
            self._failures += 1
            unforeseen = None if isinstance(e, AgentCoreRLError) else e
            level = logging.DEBUG if unforeseen is None else logging.ERROR
            logger.log(level, "the runtime did not say how sessions ended: %s", e, exc_info=unforeseen)
            return {}
        self._failures = 0
        if found is None:
            self._source = None
            return {}
        return found
