"""One session: its state, its connections and what it leaves on disk."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._parsing import parse_json
from ..agents.agent import Agent
from ..launcher import folders
from .activity import ActivityClock
from .connection import Connection, connect, connect_over

KEPT_CONNECTIONS = 4
_LATEST_S = 2**40  # beyond any time that a clock shows
SHOWN_CHARS = 600  # of a cause, in a message
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")

Key = tuple[str, str, str]  # runtime id, endpoint, session id


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
    idle_connections: list[Connection] = field(default_factory=list)
    check_at_s: float = math.inf
    ending: dict[str, Any] | None = None
    started_by: Session | None = None  # another session, which may call it then

    @property
    def id(self) -> str:
        return self.key[2]

    @property
    def over(self) -> bool:
        return self.state not in ("starting", "ready")

    def kept_connection(self) -> Connection | None:
        """A connection that an earlier request left usable."""
        while self.idle_connections:
            kept = self.idle_connections.pop()
            if kept.usable:
                return kept
        return None

    async def connection(self) -> Connection:
        """A connection to the session's server; a kept one when there is one."""
        kept = self.kept_connection()
        if kept is not None:
            return kept
        dial = getattr(self.process, "dial", None)  # its node is another machine
        return await connect(self.socket_path) if dial is None else await connect_over(await dial())

    async def cause(self) -> str | None:
        """After a connection to it broke: why, where its node can tell."""
        ask = getattr(self.process, "cause", None)
        return None if ask is None else await ask()

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose reply was read to its end; close any other."""
        if (
            connection.complete
            and connection.reusable
            and not self.over
            and len(self.idle_connections) < KEPT_CONNECTIONS
        ):
            self.idle_connections.append(connection)
        else:
            connection.close()

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
            "node": getattr(self.process, "node_id", None),
            "created_unix_s": round(self.created_unix_s, 3),
            "age_s": round(now - self.clock.born_s, 3),
            "idle_s": 0.0 if self.active else round(now - self.clock.last_active_s, 3),
            "inflight": self.clock.inflight,
            "busy": self.clock.busy,
            "invocations": self.invocations,
            "start_s": self.start_s,
            "exit_status": self.exit_status,
            "error": self.error,
            "started_by": None if self.started_by is None else self.started_by.id,
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
    folders.remove(session.directory)
    with contextlib.suppress(OSError):
        Path(session.socket_path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if session.log_path.lstat().st_size == 0:
            session.log_path.unlink()


def log_name(session_id: str, *, endpoint: str) -> str:
    """What a session's log is called: its id where that is a plain name, else a hash; ids are callers' and may hold anything."""
    name = session_id
    if not _PLAIN_ID.fullmatch(session_id):
        name = f"id.{hashlib.sha256(session_id.encode(errors='surrogatepass')).hexdigest()[:40]}"
    return name if endpoint == "DEFAULT" else f"{name}.{endpoint}"


def ping_status(body: bytes) -> tuple[str | None, float | None]:
    """Status and age of the last update out of a 200's body. Any body will do: then it is just healthy."""
    try:
        answer = parse_json(body)
    except ValueError:
        return "Healthy", None
    if not isinstance(answer, dict):
        return "Healthy", None
    stamp: Any = answer.get("time_of_last_update")
    known = isinstance(stamp, (int, float)) and not isinstance(stamp, bool)
    if known and abs(stamp) > _LATEST_S:
        known = False
    return str(answer.get("status", "Healthy")), time.time() - float(stamp) if known else None


def shortened(text: str) -> str:
    """Beginning and end of what may be a long traceback, on one line."""
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS // 3]} ... {line[-SHOWN_CHARS // 2 :]}"
