"""A session: an environment from its first call to the removal of its files.

Theory of operation. A session is ``starting`` (calls wait for its first healthy ping), ``ready``, or over, and then its state is
the reason. `Session.run` is its whole life, in one task. `Session.end` may be called at any time. It takes effect at once for
callers, while the process is still within its grace.

AWS counts a session as active while an invocation or a command runs, and while its /ping answers HealthyBusy. Otherwise it is
idle. AWS pings about every two seconds. Here a session is pinged once a while after its last call, then as often as needed while
it is busy, and right before it would end as idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ..._parsing import parse_json
from ...errors import LocalRuntimeError
from ..agents.agent import Agent
from ..config import TimeLimits
from ..launcher.connection import UpstreamLostError, open_request
from ..launcher.place import Place, SessionProcess
from ..launcher.session_log import log_tail
from ..wire import WireError

log = logging.getLogger(__name__)

Key = tuple[str, str, str]  # runtime id, endpoint, session id
SHOWN_CHARS = 600  # length of a cause in a message
PING_BYTES = 64 * 1024  # limit of a response to /ping, which has two short fields
PING_TIMEOUT_S = 5.0
PING_MIN_S, PING_MAX_S = 2.0, 15.0  # 2 s is AWS's interval. AWS keeps an idle limit to within 15 s
LATE_DEATH_S = 2.0  # the end of a process is known a little later than its connections break
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5  # between the pings of a start
INIT_FAILED = "Runtime initialization failed."
INIT_LATE = "Runtime initialization time exceeded. Please make sure that initialization completes in {:g}s."
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Session:
    """An environment. ``on_end`` is called when it is over. ``times`` are the runtime's."""

    def __init__(
        self, key: Key, agent: Agent, place: Place, *, times: TimeLimits, on_end: Callable[[Session], None]
    ) -> None:
        self.key, self.agent, self.place = key, agent, place
        self.state = "starting"
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.process: SessionProcess | None = None
        self.invocations = self.inflight = 0
        self.busy = False  # the last ping reported HealthyBusy
        self.start_s: float | None = None
        self.error: str | None = None  # while it starts: the result of the last ping
        self.closed = asyncio.Event()  # set when it is over
        self.ending: dict[str, Any] = {}  # its description when it is over. The usage of its process is added later
        self._born_s = self._last_active_s = time.monotonic()
        self._pinged = False  # since its last activity
        self._last_answer: tuple[str, Any] | None = None
        self._changed = asyncio.Event()
        self._times, self._on_end = times, on_end

    @property
    def id(self) -> str:
        return self.key[2]

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[Session]:
        """Wait until the session is ready. It is active for as long as the block runs. Raises: WireError if it did not start."""
        self.inflight += 1
        try:
            await asyncio.shield(self.ready)
            self.invocations += 1
            yield self
        finally:
            self.inflight -= 1
            self._last_active_s, self._pinged = time.monotonic(), False
            self._changed.set()

    async def death(self) -> str | None:
        """Return why its process ended, after a connection to it broke, or None if it is not known to have ended."""
        assert self.process is not None
        await asyncio.wait([self.process.ended], timeout=LATE_DEATH_S)
        return (self.process.death or _exit(self._exit_status())) if self.process.ended.done() else None

    # -- its life
    async def run(
        self,
        spawn: Callable[[Agent, Place], Awaitable[SessionProcess]],
        starting: asyncio.Semaphore,
        delay_s: float = 0.0,
    ) -> None:
        """Run from the start of the process, by ``spawn``, to its end. Never raise.

        ``starting`` bounds how many sessions start at once: each would miss its init timeout if all did.
        """
        await asyncio.sleep(min(delay_s, self._times.init_timeout_s))
        async with starting:
            await self._start(spawn, self._times.init_timeout_s - delay_s)
        while not self.closed.is_set():
            await self._watch()
        if self.process is not None:
            await self.process.ended
            self.ending["cpu_s"] = self.process.cpu_s
        facts = {"exit_status": self._exit_status(), "gone_unix_s": round(time.time(), 3), "cause": self.cause}
        self.ending |= {"gone": True, **facts}

    async def _start(self, spawn: Callable[[Agent, Place], Awaitable[SessionProcess]], limit_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                if not self.closed.is_set():
                    spawning = asyncio.ensure_future(spawn(self.agent, self.place))
                    spawning.add_done_callback(self._on_spawned)
                    await self._first_ping(await asyncio.shield(spawning))
        except TimeoutError:
            limit = self._times.init_timeout_s
            last = f", the last one was {self.error}" if self.error is not None else ""
            self._fail(INIT_LATE.format(limit), f"no healthy answer to /ping within {limit:g} s{last}")
        except Exception as e:  # callers wait for this start and have no deadline
            expected = isinstance(e, (LocalRuntimeError, OSError))
            if not expected:
                log.exception("session %s could not be started", self.id)
            self._fail(INIT_FAILED, str(e) if expected else f"{type(e).__name__}: {e}")
        else:
            if not self.closed.is_set():
                self._last_active_s = now = time.monotonic()
                self.start_s, self.state, self.error = round(now - self._born_s, 4), "ready", None
                self.ready.set_result(None)

    def _on_spawned(self, spawning: asyncio.Future[SessionProcess]) -> None:
        """Keep the process. It is killed if it came after the end of its session, or after the limit of its start."""
        if not spawning.cancelled() and spawning.exception() is None:
            self.process = spawning.result()
            self.process.ended.add_done_callback(lambda _: self._changed.set())
            if self.closed.is_set():
                self.process.stop(0.0)

    async def _first_ping(self, process: SessionProcess) -> None:
        """Ping until the session is healthy. Raises: LocalRuntimeError when its process ends."""
        pause_s = FIRST_PAUSE_S
        while not self.closed.is_set():
            try:
                status, body = await self.ask()
            except (UpstreamLostError, OSError) as e:
                self.error = str(e) or type(e).__name__
            else:
                if status == 200:
                    self.busy = ping_status(body)[0] == "HealthyBusy"
                    return
                self.error = str(status)
            await asyncio.wait([process.ended], timeout=pause_s)
            if process.ended.done():
                why = f"its process ended (status {process.ended.result()}) before it was healthy"
                raise LocalRuntimeError(process.death or why, session_id=self.id)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _watch(self) -> None:
        """Wait until something happened or a ping is due. End the session that died or is beyond its limits."""
        assert self.process is not None
        agent, now, due = self.agent, time.monotonic(), False
        next_s = lifetime_end_s = self._born_s + agent.max_lifetime_s
        if not self.inflight:
            ping_s = now + min(PING_MAX_S, max(PING_MIN_S, agent.idle_timeout_s / 60))
            idle_end_s = self._last_active_s + agent.idle_timeout_s
            next_s = min(next_s, ping_s if self.busy else idle_end_s if self._pinged else min(idle_end_s, ping_s))
        try:
            async with asyncio.timeout(max(0.0, next_s - now)):
                await self._changed.wait()
        except TimeoutError:
            due = True
        self._changed.clear()
        if self.closed.is_set():
            return
        if self.process.ended.done():
            self.error = self.process.death
            self.end("lost" if self.process.lost else "crashed", 0.0)
        elif time.monotonic() >= lifetime_end_s:
            self.end("max_lifetime", self._times.stop_grace_s)
        elif due and self.inflight == 0:
            await self._ping()
            idle_s = time.monotonic() - self._last_active_s
            if self.inflight == 0 and not self.busy and idle_s >= agent.idle_timeout_s:
                self.end("idle", self._times.stop_grace_s)

    async def _ping(self) -> None:
        was_busy, self.busy, self._pinged = self.busy, False, True
        with contextlib.suppress(Exception):  # no response of the session may keep it beyond its limits
            async with asyncio.timeout(PING_TIMEOUT_S):
                code, body = await self.ask()
            if code == 200:
                status, stamp = ping_status(body)
                self.busy = status == "HealthyBusy"
                self._compare_ping(status, stamp)
        if self.busy or was_busy:  # it was busy until some time since the last ping
            self._last_active_s = time.monotonic()

    async def ask(self) -> tuple[int, bytes]:
        """Ping the session. Return status and body of the response."""
        assert self.process is not None
        body = b""
        async with open_request(self.process.dial, b"GET", b"/ping", []) as reply:
            async for data in reply.aiter_stream():
                body += data
                if len(body) > PING_BYTES:
                    raise UpstreamLostError(f"the response to /ping has more than {PING_BYTES} bytes")
            return reply.status, body

    def _compare_ping(self, status: str, stamp: Any) -> None:
        """Warn once per agent of a /ping that AgentCore reads differently. This runtime uses only its status."""
        last, self._last_answer = self._last_answer, (status, stamp)
        if status == "HealthyBusy" and stamp is None:
            problem = "has no time_of_last_update: AgentCore then ignores HealthyBusy and ends the session as idle"
        elif status == "Healthy" and last is not None and last[0] == status and last[1] != stamp:
            problem = "changes time_of_last_update without its status: AgentCore then never ends the session as idle"
        else:
            return
        if not self.agent.warned:
            self.agent.warned = True
            text = "agent %s: its response to /ping %s; the SDK sets the time of the last change"
            log.warning(text, self.agent.name, problem)

    # -- its end
    def end(self, reason: str, grace_s: float) -> None:
        """End the session for this reason: SIGTERM now, SIGKILL after the grace. A second call only shortens the grace."""
        if not self.closed.is_set():
            if self.state == "starting" and reason != "failed_to_start":
                self.error = None
            self.state = reason
            if reason == "stopped":  # another request stopped it. The same call starts a new session.
                self._not_ready(WireError("RetryableConflictException", "Session operation in progress, please retry"))
            self._not_ready(WireError("RuntimeClientError", f"The session ended while starting: {reason}."))
            gone = self.process is None or self.process.ended.done()
            self.ending = {**self.describe(time.monotonic()), "cause": self.cause, "gone": gone}
            self.closed.set()
            self._changed.set()
            self._on_end(self)
        if self.process is not None and not self.process.ended.done():
            self.process.stop(grace_s)

    def _fail(self, message: str, why: str) -> None:
        cause = log_tail(self.place.log_path)
        self.error = f"{why}{': ' + cause if cause else ''}"
        log.warning("session %s of agent %s did not start: %s", self.id, self.agent.name, self.error)
        # Clients of AWS show the message and drop the fields that its service model does not have.
        text = f"{message} {shortened(self.error)}"
        self._not_ready(WireError("RuntimeClientError", text, localDetail=self.error))
        self.end("failed_to_start", 0.0)

    def _not_ready(self, error: WireError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()

    def _exit_status(self) -> int | None:
        if self.process is None or not self.process.ended.done():
            return None
        return self.process.ended.result()

    # -- what is shown of it
    @property
    def cause(self) -> str:
        """The reason why it is over: a sentence without its full stop."""
        return {
            "stopped": "the session was stopped by a request to its runtime",
            "idle": f"the session was ended because it was idle for {self.agent.idle_timeout_s:g} s",
            "max_lifetime": f"the session was ended at its maximum lifetime of {self.agent.max_lifetime_s:g} s",
            "shutdown": "the session was ended because its runtime was shut down",
            "failed_to_start": f"the session did not start: {self.error}",
        }.get(self.state, self.error or _exit(self._exit_status()))

    def describe(self, now: float) -> dict[str, Any]:
        """Return the session as `/_local/sessions` shows it."""
        active = self.inflight or self.busy
        state = self.state if self.state != "ready" else ("active" if active else "idle")
        return {
            "session_id": self.id,
            "agent": self.agent.name,
            "runtime_id": self.key[0],
            "version": self.agent.version,
            "endpoint": self.key[1],
            "node": self.place.node,
            "state": state,
            "pid": None if self.process is None else self.process.pid,
            "age_s": round(now - self._born_s, 3),
            "idle_s": 0.0 if active else round(now - self._last_active_s, 3),
            "inflight": self.inflight,
            "invocations": self.invocations,
            "start_s": self.start_s,
            "exit_status": self._exit_status(),
            "error": self.error,
            "log": str(self.place.log_path),
        }


def _exit(status: int | None) -> str:
    if status is None:
        return "the session's process has ended"
    if status >= 0:
        return f"the session's process ended with status {status}"
    known = -status in set(signal.Signals)
    return f"the session's process was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"


def log_name(session_id: str, *, endpoint: str) -> str:
    """Return the name of a session's log: the session id if it is a plain name, otherwise a hash."""
    name = session_id
    if not _PLAIN_ID.fullmatch(session_id):
        name = f"id.{hashlib.sha256(session_id.encode(errors='surrogatepass')).hexdigest()[:40]}"
    return f"{name}.log" if endpoint == "DEFAULT" else f"{name}.{endpoint}.log"


def ping_status(body: bytes) -> tuple[str, Any]:
    """Return the status in a 200's body, and the time since when it holds. Any other body means healthy."""
    try:
        answer = parse_json(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return "Healthy", None
    return str(answer.get("status", "Healthy")), answer.get("time_of_last_update")


def shortened(text: str) -> str:
    """Return the beginning and end of a text that may be a long traceback, on one line."""
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS // 3]} ... {line[-SHOWN_CHARS // 2 :]}"
