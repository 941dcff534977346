"""Why sessions ended, for callers that wait for their records. AWS has no such answer."""

from __future__ import annotations

import signal
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from .session import Key, Session

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
