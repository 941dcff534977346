"""One session: its state, requests to it, and its files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import signal
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._parsing import parse_json
from .. import roots
from ..agents.agent import Agent
from .activity import ActivityClock
from .connection import Connection, Headers, request

SHOWN_CHARS = 600  # of a cause, in a message
# What sessions see of the runtime's own environment: nothing else is inherited.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

Key = tuple[str, str, str]  # runtime id, endpoint, session id
MAX_ASKED = 10_000  # sessions in one question


def cause_of(session: Session) -> str:
    """Why a session is over, in one sentence without its full stop."""
    clock = session.clock
    match session.state:
        case "stopped":
            return "the session was stopped by a request to its runtime"
        case "idle":
            return f"the session was ended because it was idle for {clock.idle_timeout_s:g} s"
        case "max_lifetime":
            return f"the session was ended at its maximum lifetime of {clock.max_lifetime_s:g} s"
        case "shutdown":
            return "the session was ended because its runtime was shut down"
        case "failed_to_start":
            return f"the session did not start: {session.error}"
    return session.error or _exit(session.exit_status)


def _exit(status: int | None) -> str:
    if status is None:
        return "the session's process is gone"
    if status >= 0:
        return f"the session's process ended with status {status}"
    try:
        return f"the session's process was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"the session's process was killed by signal {-status}"


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
        if name not in wanted or (ending["runtime_id"], ending["endpoint"]) != (runtime_id, endpoint):
            continue
        found[name] = {"cause": ending["cause"], "gone": ending["gone"], "log": ending["log"]}
    return found


@dataclass(eq=False)
class Session:
    """One environment. ``state`` is starting, ready or the reason it ended."""

    key: Key
    agent: Agent
    clock: ActivityClock
    directory: Path
    log_path: Path
    socket_path: str
    created_unix_s: float
    ready: asyncio.Future[None]
    state: str = "starting"
    process: Any = None
    start_s: float | None = None
    invocations: int = 0
    error: str | None = None
    ping_answer: str | None = None  # while it starts: what it answered when it was not healthy
    exit_status: int | None = None
    checking: bool = False
    last_ping: tuple[str, Any] | None = None  # status and time
    ending: dict[str, Any] | None = None

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

    def request(
        self, method: bytes, path: bytes, headers: Headers, body: Sequence[bytes] = ()
    ) -> contextlib.AbstractAsyncContextManager[Connection]:
        """A request to the session's server, on a connection of its own; the block reads the reply. Raises: UpstreamLostError."""
        return request(self.process.dial, method, path, headers, body)

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
            "exit_status": self.exit_status,
            "error": self.error,
            "log": str(self.log_path),
        }

    @property
    def active(self) -> bool:
        return self.clock.inflight > 0 or self.clock.busy


def is_over(session: Session) -> bool:
    """For use after an await, where a type checker still believes what it saw before."""
    return session.over


def remove_files(session: Session) -> None:
    """Remove an ended session's folder and socket, and its log when it is empty. Blocks."""
    roots.remove(session.directory)
    with contextlib.suppress(OSError):
        Path(session.socket_path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if session.log_path.lstat().st_size == 0:
            session.log_path.unlink()


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
