"""One session: an environment from its first call to the removal of its files.

Theory of operation. A session is ``starting`` (calls wait for its first healthy ping), ``ready``, or over, and then its state is
the reason. `Session.run` is its whole life, in one task. `Session.end` may be called at any time. It takes effect at once for
callers, while the old process is still within its grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._parsing import parse_json
from ...errors import LocalRuntimeError
from .. import roots
from ..agents.agent import Agent
from ..config import TimeLimits
from ..launcher.session_log import log_tail
from ..wire import WireError
from .activity import ActivityClock
from .connection import Connection, Headers, UpstreamLostError, request

log = logging.getLogger(__name__)

SHOWN_CHARS = 600  # of a cause, in a message
# What sessions see of the runtime's own environment: nothing else is inherited.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

Key = tuple[str, str, str]  # runtime id, endpoint, session id
MAX_ASKED = 10_000  # sessions in one question
PING_BYTES = 64 * 1024  # of its answer, which has two short fields
PING_TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5  # between the pings of a start
DEATH_S = 2.0  # for the exit status of a process that broke its connection
INIT_FAILED = "Runtime initialization failed."
INIT_LATE = "Runtime initialization time exceeded. Please make sure that initialization completes in {:g}s."


@dataclass(frozen=True)
class SessionFolders:
    """Where sessions' own folders, logs and sockets are."""

    sessions: Path
    logs: Path
    sockets: Path


class Session:
    """One environment. ``spawn`` starts its process. ``on_end`` is called when it is over.

    A process has ``started`` and ``ended`` (futures of its id and of its exit status), ``dial``, ``command``, ``stop(grace_s)``,
    ``cause`` and ``death``.
    """

    def __init__(
        self,
        key: Key,
        agent: Agent,
        number: int,
        *,
        folders: SessionFolders,
        times: TimeLimits,
        spawn: Callable[[Session], Awaitable[Any]],
        on_end: Callable[[Session], None],
    ) -> None:
        self.key, self.agent = key, agent
        self.directory = folders.sessions / agent.folder / str(number)
        self.log_path = folders.logs / agent.name / f"{log_name(key[2], endpoint=key[1])}.log"
        self.socket_path = str(folders.sockets / agent.folder / f"{number}.s")
        self.clock = ActivityClock(time.monotonic(), agent.idle_timeout_s, agent.max_lifetime_s)
        self.created_unix_s = time.time()
        self.state = "starting"
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process: Any = None
        self.start_s: float | None = None
        self.invocations = 0
        self.error: str | None = None  # while it starts: what the last ping got
        self.closed = asyncio.Event()  # set when it is over
        self.ending: dict[str, Any] | None = None  # its description then; what its process used is added later
        self._times, self._spawn, self._on_end = times, spawn, on_end
        self._exit_status: int | None = None
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.key[2]

    @property
    def name(self) -> str:
        """Of this start: unique among its agent version's, not the caller's id."""
        return self.directory.name

    @property
    def over(self) -> bool:
        return self.state not in ("starting", "ready")

    @property
    def active(self) -> bool:
        return self.clock.inflight > 0 or self.clock.busy

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[Session]:
        """Wait until the session is ready. It is active for as long as the block runs. Raises: WireError if it did not start."""
        self.clock.begin(time.monotonic())
        try:
            await asyncio.shield(self.ready)
            self.invocations += 1
            yield self
        finally:
            self.clock.end(time.monotonic())

    def request(
        self, method: bytes, path: bytes, headers: Headers, body: Sequence[bytes] = ()
    ) -> contextlib.AbstractAsyncContextManager[Connection]:
        """A request to the session's server, on a connection of its own; the block reads the reply. Raises: UpstreamLostError."""
        return request(self.process.dial, method, path, headers, body)

    # -- its life
    async def run(self, starting: asyncio.Semaphore, delay_s: float, clean_up: Executor) -> None:
        """Live from the start of the process to the removal of the files. Never raises.

        ``starting`` bounds how many sessions start at once: each would miss its init timeout if all did.
        """
        await asyncio.sleep(min(delay_s, self._times.init_timeout_s))
        async with starting:
            await self._start(self._times.init_timeout_s - delay_s)
        while not self.over:
            await self._check()
        assert self.ending is not None
        if self.process is not None:
            self._exit_status = await self.process.ended
            usage = {"cpu_s": self.process.cpu_s, "max_rss_bytes": self.process.max_rss_bytes}
            self.ending |= {"exit_status": self._exit_status, **usage}
        self.ending |= {"gone": True, "gone_unix_s": round(time.time(), 3), "cause": self.cause}
        await asyncio.get_running_loop().run_in_executor(clean_up, self._remove_files)

    async def _start(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                if not self.over:
                    self.process = await self._spawn(self)
                    self.process.ended.add_done_callback(lambda _: self._changed.set())
                    await asyncio.shield(self.process.started)
                if _is_over(self):  # stopped meanwhile
                    self._stop_process(0.0)
                    return
                await self._first_ping()
        except TimeoutError:
            limit = self._times.init_timeout_s
            last_answer = f", the last one was {self.error}" if self.error is not None else ""
            self._fail(INIT_LATE.format(limit), f"no healthy answer to /ping within {limit:g} s{last_answer}")
        except (LocalRuntimeError, UpstreamLostError, OSError) as e:
            if self.process is not None and not self.over:
                await asyncio.wait([self.process.ended], timeout=DEATH_S)
            self._fail(INIT_FAILED, str(e))
        except Exception as e:  # callers wait for this start, without a deadline of their own
            log.exception("session %s could not be started", self.id)
            self._fail(INIT_FAILED, f"{type(e).__name__}: {e}")
        else:
            if not _is_over(self):
                now = time.monotonic()
                self.start_s, self.state, self.error = round(now - self.clock.born_s, 4), "ready", None
                self.clock.last_active_s = now
                self.ready.set_result(None)

    async def _first_ping(self) -> None:
        """Ask until the session is healthy. Raises: LocalRuntimeError when its process ends."""
        pause_s = FIRST_PAUSE_S
        while not self.over:
            try:
                code, body = await self.ask()
            except (UpstreamLostError, OSError) as e:
                self.error = str(e) or type(e).__name__
            else:
                if code == 200 or not self.agent.pinged:
                    self.clock.saw_ping(ping_status(body)[0] if code == 200 else None, time.monotonic())
                    self.clock.last_ping_s = None
                    return
                self.error = str(code)
            await asyncio.wait([self.process.ended], timeout=pause_s)
            if self.process.ended.done():
                status = self.process.ended.result()
                raise LocalRuntimeError(
                    f"its process ended (status {status}) before it was healthy", session_id=self.id
                )
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _check(self) -> None:
        """Sleep until the session may be over: its process ended, it was stopped, or it is due to be pinged."""
        self._changed.clear()
        now = time.monotonic()
        due_s = self.clock.next_check_s() if self.clock.inflight == 0 else now + self.clock.ping_interval_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due_s - now)):
                if not self.over and not self.process.ended.done():
                    await self._changed.wait()
        if self.process.ended.done() and not self.over:
            self._exit_status = self.process.ended.result()
            self.error = self.process.death
            self.end("crashed", 0.0)
        if self.over:
            return
        verdict = self.clock.verdict(time.monotonic())
        if verdict is None and self.clock.inflight == 0 and time.monotonic() >= self.clock.next_check_s():
            await self._ping()
            verdict = self.clock.verdict(time.monotonic())
        if verdict is not None:
            self.end(verdict, self._times.stop_grace_s)

    async def _ping(self) -> None:
        status: str | None = None
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                code, body = await self.ask()
            if code == 200:
                status, stamp = ping_status(body)
                self._compare_ping(status, stamp)
        except (TimeoutError, UpstreamLostError, OSError):
            pass
        except Exception:  # none of its answers may keep a session beyond its limits
            log.exception("the answer of session %s to /ping cannot be read", self.id)
        self.clock.saw_ping(status, time.monotonic())

    async def ask(self) -> tuple[int, bytes]:
        """Status and body of the answer to a ping."""
        async with self.request(b"GET", b"/ping", []) as reply:
            return reply.status, await reply.whole(PING_BYTES)

    def _compare_ping(self, status: str, stamp: Any) -> None:
        """Warn once per agent of a /ping that AgentCore takes differently. Sessions are idle here by the status only."""
        last, self.clock.last_answer = self.clock.last_answer, (status, stamp)
        problem = None
        if status == "HealthyBusy" and stamp is None:
            problem = "has no time_of_last_update: AgentCore then ignores HealthyBusy and ends the session as idle"
        elif status == "Healthy" and last is not None and last[0] == status and last[1] != stamp:
            problem = (
                "changes time_of_last_update while its status stays: AgentCore then never ends the session as idle"
            )
        if problem is not None and not self.agent.warned:
            self.agent.warned.append(problem)
            text = "agent %s: its response to /ping %s; the SDK sets the time of the last change"
            log.warning(text, self.agent.name, problem)

    # -- its end
    def end(self, reason: str, grace_s: float) -> None:
        """End the session for this reason: SIGTERM now, SIGKILL after the grace. A second call changes nothing."""
        if self.over:
            return
        if self.state == "starting" and reason != "failed_to_start":
            self.error = None
        self.state = reason
        if not self.ready.done():
            self.ready.set_exception(_ended_while_starting(reason))
            self.ready.exception()
        self._stop_process(grace_s)
        gone = self.process is None or bool(self.process.ended.done())
        self.ending = {**self.describe(time.monotonic()), "cause": self.cause, "gone": gone}
        self.closed.set()
        self._changed.set()
        self._on_end(self)

    def hurry(self, grace_s: float) -> None:
        """Shorten the grace of a session that is ending."""
        self._stop_process(grace_s)

    def _fail(self, message: str, why: str) -> None:
        cause = log_tail(self.log_path)
        self.error = f"{why}{': ' + cause if cause else ''}"
        log.warning("session %s of agent %s did not start: %s", self.id, self.agent.name, self.error)
        if not self.ready.done():
            # Clients of AWS show the message and drop what its service model does not name.
            self.ready.set_exception(
                WireError("RuntimeClientError", f"{message} {shortened(self.error)}", localDetail=self.error)
            )
            self.ready.exception()
        self.end("failed_to_start", 0.0)

    def _stop_process(self, grace_s: float) -> None:
        if self.process is not None and not self.process.ended.done():
            self.process.stop(grace_s)

    def _remove_files(self) -> None:
        """Remove the session's folder and socket, and its log when it is empty. Blocks."""
        roots.remove(self.directory)
        with contextlib.suppress(OSError):
            Path(self.socket_path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if self.log_path.lstat().st_size == 0:
                self.log_path.unlink()

    # -- what is shown of it
    @property
    def cause(self) -> str:
        """Why it is over, in one sentence without its full stop."""
        return {
            "stopped": "the session was stopped by a request to its runtime",
            "idle": f"the session was ended because it was idle for {self.clock.idle_timeout_s:g} s",
            "max_lifetime": f"the session was ended at its maximum lifetime of {self.clock.max_lifetime_s:g} s",
            "shutdown": "the session was ended because its runtime was shut down",
            "failed_to_start": f"the session did not start: {self.error}",
        }.get(self.state, self.error or _exit(self._exit_status))

    def describe(self, now: float) -> dict[str, Any]:
        """The session as `/_local/sessions` shows it."""
        return {
            "session_id": self.id,
            "agent": self.agent.name,
            "runtime_id": self.key[0],
            "version": self.agent.version,
            "endpoint": self.key[1],
            "state": self.state if self.over or self.state == "starting" else ("active" if self.active else "idle"),
            "pid": getattr(self.process, "pid", None),
            "created_unix_s": round(self.created_unix_s, 3),
            "age_s": round(now - self.clock.born_s, 3),
            "idle_s": 0.0 if self.active else round(now - self.clock.last_active_s, 3),
            "inflight": self.clock.inflight,
            "busy": self.clock.busy,
            "invocations": self.invocations,
            "start_s": self.start_s,
            "exit_status": self._exit_status,
            "error": self.error,
            "log": str(self.log_path),
        }


def endings_of(
    live: Container[Key],
    ended: Iterable[Mapping[str, Any]],
    runtime_id: str,
    endpoint: str,
    session_ids: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Of these sessions those that are over: why, and whether their processes are gone. The others live, or are forgotten.

    ``live`` and ``ended`` are all of the runtime's, the ended ones oldest first.
    """
    wanted = {name for name in session_ids if (runtime_id, endpoint, name) not in live}
    found: dict[str, dict[str, Any]] = {}
    for ending in ended if wanted else ():  # of several with one id the last one counts
        name = ending["session_id"]
        if name in wanted and (ending["runtime_id"], ending["endpoint"]) == (runtime_id, endpoint):
            found[name] = {"cause": ending["cause"], "gone": ending["gone"], "log": ending["log"]}
    return found


def _is_over(session: Session) -> bool:
    """For use after an await, where a type checker still believes what it saw before."""
    return session.over


def _exit(status: int | None) -> str:
    if status is None:
        return "the session's process is gone"
    if status >= 0:
        return f"the session's process ended with status {status}"
    try:
        return f"the session's process was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"the session's process was killed by signal {-status}"


def _ended_while_starting(reason: str) -> WireError:
    if reason == "stopped":  # by another request; the same call starts a new session
        return WireError("RetryableConflictException", "Session operation in progress, please retry")
    return WireError("RuntimeClientError", f"The session ended while starting: {reason}.")


def log_name(session_id: str, *, endpoint: str) -> str:
    """The name of a session's log: its id if that is a plain name, else a hash, because callers' ids may hold anything."""
    name = session_id
    if not _PLAIN_ID.fullmatch(session_id):
        name = f"id.{hashlib.sha256(session_id.encode(errors='surrogatepass')).hexdigest()[:40]}"
    return name if endpoint == "DEFAULT" else f"{name}.{endpoint}"


def ping_status(body: bytes) -> tuple[str, Any]:
    """The status in a 200's body, and the time since when it holds. Any body will do: then it is just healthy."""
    try:
        answer = parse_json(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return "Healthy", None
    return str(answer.get("status", "Healthy")), answer.get("time_of_last_update")


def shortened(text: str) -> str:
    """Beginning and end of what may be a long traceback, on one line."""
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS // 3]} ... {line[-SHOWN_CHARS // 2 :]}"
