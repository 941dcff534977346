"""Sessions of a runtime: one environment per session id. An id leaves the table at once when its session ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..launcher.place import Place, SessionProcess
from ..metrics import Metrics
from .session import Key, Session, log_name

log = logging.getLogger(__name__)
REMEMBERED_ENDINGS = 4_000
LATE_S = 5.0  # limit from the kill of a session to the removal of its files


class Launcher(Protocol):
    """The processes of sessions: on this machine (`LocalNode`), or on the nodes of a cluster. ``tier`` is their isolation.

    ``prepare`` loads an agent version unless it is loaded, and ``forget`` ends it with its sessions. ``place`` chooses where the
    files of a new session are, and raises WireError 402 if there is no room. ``discard`` removes the files of a session that is
    over. Raises: AgentLoadError, LocalRuntimeError.
    """

    @property
    def tier(self) -> str: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def prepare(self, agent: Agent) -> object: ...
    async def forget(self, agent: Agent) -> None: ...
    def describe(self) -> list[dict[str, Any]]: ...
    async def read_log(self, session: Mapping[str, Any], offset: int, size: int) -> bytes: ...
    def place(self, agent: Agent, name: str, log: str) -> Place: ...
    async def spawn(self, agent: Agent, place: Place) -> SessionProcess: ...
    async def discard(self, place: Place) -> None: ...


class SessionTable:
    """All live sessions.

    ``admit`` is called before a new session is started and may raise a WireError. ``on_gone`` is called when the
    process and the files of a session are removed.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: RuntimeConfig,
        metrics: Metrics,
        admit: Callable[[Agent, str, int], None] = lambda agent, endpoint, live: None,
        on_gone: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self.sessions: dict[Key, Session] = {}
        self.ended: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_ENDINGS)
        self.started_total = 0
        self.ended_total: Counter[str] = Counter()
        self._launcher, self._config, self._metrics = launcher, config, metrics
        self._admit, self._on_gone = admit, on_gone
        self._numbers = itertools.count(1)
        self._lives: dict[Session, asyncio.Task[None]] = {}  # includes ending sessions
        self._starting = asyncio.Semaphore(config.parallel_starts)

    def open(self, agent: Agent, key: Key, *, start_delay_s: float = 0.0) -> Session:
        """Return the session of this id. It is started if there is none, ``start_delay_s`` late.

        Raises: WireError 402/429 from admission.
        """
        session = self.sessions.get(key)
        if session is None:
            self._admit(agent, key[1], len(self.sessions))
            place = self._launcher.place(agent, str(next(self._numbers)), log_name(key[2], endpoint=key[1]))
            session = self.sessions[key] = Session(key, agent, place, times=self._config.times, on_end=self._ended)
            session.ready.add_done_callback(lambda _: self._metrics.add_start(session.start_s))
            self.started_total += 1
            self._lives[session] = asyncio.create_task(self._run(session, start_delay_s))
        return session

    async def _run(self, session: Session, start_delay_s: float) -> None:
        await session.run(self._launcher.spawn, self._starting, start_delay_s)
        try:
            await self._launcher.discard(session.place)
        except Exception as e:  # such as too many open files or threads: they are removed with the runtime's folder
            log.warning("the files of session %s were not removed: %s", session.id, e)
        if session.process is not None:
            self._metrics.session_cpu_s += session.process.cpu_s or 0.0
        del self._lives[session]
        self._on_gone(session)

    def _ended(self, session: Session) -> None:
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
        self.ended_total[session.state] += 1
        self.ended.append(session.ending)

    def stop(self, key: Key) -> Session | None:
        """Take the id out of the table and end its environment in the background. None when there is no such session."""
        session = self.sessions.get(key)
        if session is not None:
            session.end("stopped", self._config.times.stop_grace_s)
        return session

    def sessions_of(self, agent: Agent) -> list[Session]:
        """Return the sessions of an agent version, also those that are ending."""
        return [session for session in self._lives if session.agent.key == agent.key]

    async def close(self) -> None:
        """End every session within the shutdown grace. The launcher ends the rest."""
        grace_s = min(self._config.times.shutdown_grace_s, self._config.times.stop_grace_s)
        for session in list(self._lives):
            session.end("shutdown", grace_s)
        if self._lives:
            await asyncio.wait(self._lives.values(), timeout=grace_s + LATE_S)

    def describe(self) -> list[dict[str, Any]]:
        """Return the live sessions as `/_local/sessions` shows them."""
        now = time.monotonic()
        return [s.describe(now) for s in self.sessions.values()]

    def endings(self, runtime_id: str, endpoint: str, session_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Describe those of these sessions that are over. Sessions that live or are forgotten are left out."""
        wanted = {name for name in session_ids if (runtime_id, endpoint, name) not in self.sessions}
        found = {}
        for ending in self.ended if wanted else ():  # the last one with an id counts
            name = ending["session_id"]
            if name in wanted and (ending["runtime_id"], ending["endpoint"]) == (runtime_id, endpoint):
                found[name] = {"cause": ending["cause"], "gone": ending["gone"], "log": ending["log"]}
        return found
