"""Sessions of a runtime: one environment per session id, from first call to last byte.

Theory of operation. A session is ``starting`` (its process is ordered; calls wait for it, all on the same start), ``ready``,
or over. It ends by being stopped, idle, too old, by its process dying, or by a failed start. Ending takes the id out of the
table at once, so the next call with the same id gets a fresh environment, while the old process is still within its grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._servers.tasks import Tasks
from ...errors import LocalRuntimeError
from ..agents.agent import Agent
from ..config import RuntimeConfig
from ..launcher.session_log import log_tail
from ..wire import WireError
from .activity import ActivityClock
from .connection import UpstreamLostError
from .session import Key, Session, cause_of, is_over, log_name, ping_status, remove_files, shortened

log = logging.getLogger(__name__)
PING_BYTES = 64 * 1024  # of its answer, which has two short fields
PING_TIMEOUT_S = 5.0
CLEAN_UP_THREADS = 4
LOOK_S = 0.25  # between two looks at the limits of all sessions
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5  # between the questions of a start
INIT_FAILED = "Runtime initialization failed."
REMEMBERED_ENDINGS = 1_000


@dataclass(frozen=True)
class SessionFolders:
    """Where sessions' own folders, logs and sockets are."""

    sessions: Path
    logs: Path
    sockets: Path


class SessionTable:
    """All live sessions. ``node`` starts them (`LocalNode`), as objects with ``started`` and ``ended`` futures, ``pid``,
    ``command``, ``stop(grace_s)``, ``dial``, ``cause`` and ``death``.

    ``admit`` is asked before a new one is started and may raise a WireError;
    ``on_start`` and ``on_gone`` (its process is no more, its folder removed) tell who wants to know.
    """

    def __init__(self, node: Any, config: RuntimeConfig, folders: SessionFolders) -> None:
        self.node = node
        self.config = config
        self.sessions: dict[Key, Session] = {}
        self.ended: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_ENDINGS)
        self.admit: Callable[[Agent, str, int], None] = lambda agent, endpoint, live: None
        self.on_start: Callable[[Session], None] = lambda session: None
        self.on_gone: Callable[[Session], None] = lambda session: None
        self.started_total = 0
        self.ended_total: dict[str, int] = {}
        self._folders = folders
        self._numbers = itertools.count(1)
        self._tasks = Tasks()
        self._stopping: set[Session] = set()
        self._warned: set[str] = set()  # agents
        # A session can leave files that take minutes to remove: they keep nothing else waiting.
        self._clean_up = ThreadPoolExecutor(CLEAN_UP_THREADS, thread_name_prefix="clean-up")
        # A machine has fewer cores than AWS: were all sessions of a burst to start at once, each would miss its init timeout.
        self._starting = asyncio.Semaphore(config.parallel_starts)

    # -- use
    @contextlib.asynccontextmanager
    async def in_use(self, agent: Agent, key: Key, *, start_delay_s: float = 0.0) -> AsyncIterator[Session]:
        """The session of this id, started if there is none (``start_delay_s`` late); it is active for as long as the block runs.

        Raises: WireError 402/429 from admission, 424 when it did not start.
        """
        session = self.sessions.get(key)
        if session is None:
            self.admit(agent, key[1], len(self.sessions))
            session = self._begin(key, agent, start_delay_s)
        session.clock.begin(time.monotonic())
        try:
            await asyncio.shield(session.ready)
            session.invocations += 1
            yield session
        finally:
            session.clock.end(time.monotonic())

    def stop(self, key: Key, *, grace_s: float | None = None) -> Session | None:
        """Take the id out of the table and end its environment in the background. None when there is no such session."""
        session = self.sessions.get(key)
        if session is not None:
            self._end(session, "stopped", self.config.times.stop_grace_s if grace_s is None else grace_s)
        return session

    async def reap(self) -> None:
        """Run forever: ping sessions that are due and end those past a limit."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for session in list(self.sessions.values()):
                if now >= session.clock.next_check_s() and not session.checking:
                    session.checking = True
                    self._tasks.start(self._check(session))

    async def close(self) -> None:
        """End every session within the shutdown grace."""
        for session in list(self.sessions.values()):
            self._end(session, "shutdown", self.config.times.shutdown_grace_s)
        for session in list(self._stopping):
            if session.process is not None:
                session.process.stop(min(self.config.times.shutdown_grace_s, self.config.times.stop_grace_s))
        processes = [s.process.ended for s in self._stopping if s.process is not None]
        if processes:
            await asyncio.wait(processes)
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._clean_up.shutdown(wait=False)

    def describe(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [s.describe(now) for s in self.sessions.values()]

    # -- starting
    def _begin(self, key: Key, agent: Agent, start_delay_s: float) -> Session:
        number = next(self._numbers)
        now = time.monotonic()
        session = Session(
            key=key,
            agent=agent,
            clock=ActivityClock(now, agent.idle_timeout_s, agent.max_lifetime_s),
            directory=self._folders.sessions / agent.folder / str(number),
            log_path=self._folders.logs / agent.name / f"{log_name(key[2], endpoint=key[1])}.log",
            socket_path=str(self._folders.sockets / agent.folder / f"{number}.s"),
            created_unix_s=time.time(),
            ready=asyncio.get_running_loop().create_future(),
        )
        self.sessions[key] = session
        self.started_total += 1
        self._tasks.start(self._start(session, start_delay_s))
        return session

    async def _start(self, session: Session, delay_s: float) -> None:
        limit_s = self.config.times.init_timeout_s
        if delay_s:
            await asyncio.sleep(min(delay_s, limit_s))
        async with self._starting:
            if not session.over:
                await self._start_within(session, max(0.0, limit_s - delay_s))

    async def _start_within(self, session: Session, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._start_process(session)
        except TimeoutError:
            limit = f"{self.config.times.init_timeout_s:g}"
            failure = (
                f"Runtime initialization time exceeded. Please make sure that initialization completes in {limit}s."
            )
            last_answer = f", the last one was {session.ping_answer}" if session.ping_answer is not None else ""
            self._fail_start(session, failure, f"no healthy answer to /ping within {limit} s{last_answer}")
        except (LocalRuntimeError, UpstreamLostError, OSError) as e:
            if session.process is not None and not session.over:
                try:
                    async with asyncio.timeout(2.0):
                        session.exit_status = await asyncio.shield(session.process.ended)
                except TimeoutError:
                    session.exit_status = None
            self._fail_start(session, INIT_FAILED, str(e))
        except Exception as e:  # callers wait for this start, without a deadline of their own
            log.exception("session %s could not be started", session.id)
            self._fail_start(session, INIT_FAILED, f"{type(e).__name__}: {e}")

    def _fail_start(self, session: Session, message: str, why: str) -> None:
        cause = log_tail(session.log_path)
        session.error = f"{why}{': ' + cause if cause else ''}"
        log.warning("session %s of agent %s did not start: %s", session.id, session.agent.name, session.error)
        # Clients of AWS show the message and drop what its service model does not name.
        error = WireError("RuntimeClientError", f"{message} {shortened(session.error)}", localDetail=session.error)
        if not session.ready.done():
            session.ready.set_exception(error)
            session.ready.exception()
        self._end(session, "failed_to_start", 0.0)

    async def _start_process(self, session: Session) -> None:
        session.process = await self.node.start_session(session)
        self._tasks.start(self._wait_end(session))
        if is_over(session):  # stopped while it was being started
            session.process.stop(0.0)
            return
        await session.process.started
        await self._first_ping(session)
        if session.over:
            return
        now = time.monotonic()
        session.start_s = round(now - session.clock.born_s, 4)
        self.on_start(session)
        session.state = "ready"
        session.clock.last_active_s = now
        if not session.ready.done():
            session.ready.set_result(None)

    async def _wait_end(self, session: Session) -> None:
        session.exit_status = await session.process.ended
        if not session.over and session.state == "ready":
            session.error = session.process.death
            self._end(session, "crashed", 0.0)
        self._stopping.discard(session)
        if session.ending is not None:  # what is known only now that its process is gone
            session.ending |= {
                "gone": True,
                "gone_unix_s": round(time.time(), 3),
                "cause": cause_of(session),
                "exit_status": session.exit_status,
                "cpu_s": session.process.cpu_s,
                "max_rss_bytes": session.process.max_rss_bytes,
            }
        await asyncio.get_running_loop().run_in_executor(self._clean_up, remove_files, session)
        self.on_gone(session)

    # -- watching
    async def _check(self, session: Session) -> None:
        try:
            verdict = session.clock.verdict(time.monotonic())
            if verdict is None and session.clock.inflight == 0:
                await self._ping(session)
                verdict = session.clock.verdict(time.monotonic())
            if verdict is not None:
                self._end(session, verdict, self.config.times.stop_grace_s)
        finally:
            session.checking = False

    async def _first_ping(self, session: Session) -> None:
        """Ask until the session is healthy; its init timeout is the caller's. Raises: LocalRuntimeError when its process ends."""
        pause_s = FIRST_PAUSE_S
        while not is_over(session):
            try:
                code, body = await self._ask(session)
            except (UpstreamLostError, OSError) as e:
                session.ping_answer = str(e) or type(e).__name__
            else:
                if code == 200 or not session.agent.pinged:
                    session.clock.saw_ping(ping_status(body)[0] if code == 200 else None, time.monotonic())
                    session.clock.last_ping_s = None
                    return
                session.ping_answer = str(code)
            await asyncio.wait([session.process.ended], timeout=pause_s)
            if session.process.ended.done():
                status = session.process.ended.result()
                raise LocalRuntimeError(
                    f"its process ended (status {status}) before it was healthy", session_id=session.id
                )
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ping(self, session: Session) -> None:
        status: str | None = None
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                code, body = await self._ask(session)
            if code == 200:
                status, stamp = ping_status(body)
                self._warn_of_ping(session, status, stamp)
        except (TimeoutError, UpstreamLostError, OSError):
            pass
        except Exception:  # none of its answers may keep a session beyond its limits
            log.exception("the answer of session %s to /ping cannot be read", session.id)
        session.clock.saw_ping(status, time.monotonic())

    def _warn_of_ping(self, session: Session, status: str, stamp: Any) -> None:
        """Warn once per agent of a /ping that AgentCore takes differently. Sessions are idle here by the status only."""
        last, session.last_ping = session.last_ping, (status, stamp)
        problem = None
        if status == "HealthyBusy" and stamp is None:
            problem = "has no time_of_last_update: AgentCore then ignores HealthyBusy and ends the session as idle"
        elif status == "Healthy" and last is not None and last[0] == status and last[1] != stamp:
            problem = (
                "changes time_of_last_update while its status stays: AgentCore then never ends the session as idle"
            )
        if problem is not None and session.agent.name not in self._warned:
            self._warned.add(session.agent.name)
            log.warning(
                "agent %s: its response to /ping %s; the SDK sets the time of the last change",
                session.agent.name,
                problem,
            )

    async def _ask(self, session: Session) -> tuple[int, bytes]:
        async with session.request(b"GET", b"/ping", []) as reply:
            return reply.status, await reply.whole(PING_BYTES)

    # -- ending
    def _end(self, session: Session, reason: str, grace_s: float) -> None:
        if session.over:
            return
        session.state = reason
        if self.sessions.get(session.key) is session:
            del self.sessions[session.key]
        if not session.ready.done():
            session.ready.set_exception(_ended_while_starting(reason))
            session.ready.exception()
        if session.process is not None and not session.process.ended.done():
            self._stopping.add(session)
            session.process.stop(grace_s)
        self.ended_total[reason] = self.ended_total.get(reason, 0) + 1
        gone = session.process is None or bool(session.process.ended.done())
        session.ending = {**session.describe(time.monotonic()), "cause": cause_of(session), "gone": gone}
        self.ended.append(session.ending)


def _ended_while_starting(reason: str) -> WireError:
    if reason == "stopped":  # by another request; the same call starts a new session
        return WireError("RetryableConflictException", "Session operation in progress, please retry")
    return WireError("RuntimeClientError", f"The session ended while starting: {reason}.")
