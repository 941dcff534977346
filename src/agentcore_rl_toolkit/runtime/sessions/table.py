"""Sessions of a runtime: one environment per session id. An id leaves the table at once when its session ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..._servers.tasks import Tasks
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..metrics import Metrics
from .session import Key, Session, SessionFolders

CLEAN_UP_THREADS = 4
REMEMBERED_ENDINGS = 1_000


class SessionTable:
    """All live sessions. ``spawn`` starts the process of one.

    ``admit`` is called before a new session is started and may raise a WireError; ``on_gone`` when a session's process is no more
    and its files are removed.
    """

    def __init__(
        self,
        spawn: Callable[[Session], Awaitable[Any]],
        config: RuntimeConfig,
        folders: SessionFolders,
        metrics: Metrics,
    ) -> None:
        self.sessions: dict[Key, Session] = {}
        self.ended: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_ENDINGS)
        self.admit: Callable[[Agent, str, int], None] = lambda agent, endpoint, live: None
        self.on_gone: Callable[[Session], None] = lambda session: None
        self.started_total = 0
        self.ended_total: dict[str, int] = {}
        self._spawn, self._config, self._folders, self._metrics = spawn, config, folders, metrics
        self._numbers = itertools.count(1)
        self._all: set[Session] = set()  # with those that are ending
        self._tasks = Tasks()
        # A session can leave files that take minutes to remove: they keep nothing else waiting.
        self._clean_up = ThreadPoolExecutor(CLEAN_UP_THREADS, thread_name_prefix="clean-up")
        self._starting = asyncio.Semaphore(config.parallel_starts)

    @contextlib.asynccontextmanager
    async def in_use(self, agent: Agent, key: Key, *, start_delay_s: float = 0.0) -> AsyncIterator[Session]:
        """The session of this id, started if there is none (``start_delay_s`` late); it is active for as long as the block runs.

        Raises: WireError 402/429 from admission, 424 when it did not start.
        """
        session = self.sessions.get(key)
        if session is None:
            self.admit(agent, key[1], len(self.sessions))
            session = self._begin(key, agent, start_delay_s)
        async with session.in_use():
            yield session

    def _begin(self, key: Key, agent: Agent, start_delay_s: float) -> Session:
        session = Session(
            key,
            agent,
            next(self._numbers),
            folders=self._folders,
            times=self._config.times,
            spawn=self._spawn,
            on_end=self._ended,
        )
        self.sessions[key] = session
        self._all.add(session)
        session.ready.add_done_callback(lambda _: self._count_start(session))
        self.started_total += 1
        self._tasks.start(self._run(session, start_delay_s))
        return session

    def _count_start(self, session: Session) -> None:
        if session.start_s is not None:
            self._metrics.start_s.add(session.start_s)

    async def _run(self, session: Session, start_delay_s: float) -> None:
        await session.run(self._starting, start_delay_s, self._clean_up)
        if session.process is not None:
            self._metrics.session_cpu_s += session.process.cpu_s or 0.0
        self._all.discard(session)
        self.on_gone(session)

    def _ended(self, session: Session) -> None:
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
        self.ended_total[session.state] = self.ended_total.get(session.state, 0) + 1
        assert session.ending is not None
        self.ended.append(session.ending)

    def stop(self, key: Key, *, grace_s: float | None = None) -> Session | None:
        """Take the id out of the table and end its environment in the background. None when there is no such session."""
        session = self.sessions.get(key)
        if session is not None:
            session.end("stopped", self._config.times.stop_grace_s if grace_s is None else grace_s)
        return session

    async def close(self) -> None:
        """End every session within the shutdown grace."""
        grace_s = self._config.times.shutdown_grace_s
        for session in list(self._all):
            session.end("shutdown", grace_s)
            session.hurry(min(grace_s, self._config.times.stop_grace_s))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._clean_up.shutdown(wait=False)

    def describe(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [s.describe(now) for s in self.sessions.values()]
