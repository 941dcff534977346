"""`/_local/...`, routes that AWS does not have: sessions, logs, metrics, status, faults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._parsing import parse_json
from ...errors import ConfigError
from .. import metrics
from ..api.faults import FaultPlan
from ..launcher.session_log import read_log
from ..runtime import Runtime
from ..sessions.session import MAX_ASKED, endings_of
from ..wire import Route, invalid, not_found
from .responses import Send, reply, reply_json

LOG_BYTES = 1_000_000


async def answer(
    runtime: Runtime,
    method: str,
    path: Sequence[str],
    query: Mapping[str, str],
    body: bytes,
    send: Send,
) -> None:
    """Reply to a local request. Raises: WireError 404, 400."""
    match (method, *path):
        case ("GET", "sessions"):
            if runtime.cluster is not None:
                await runtime.cluster.refresh()
            content = {"sessions": runtime.shown.describe(), "ended": list(runtime.shown.ended)}
            await reply_json(send, content)
        case ("GET", "status"):
            await reply_json(send, runtime.status())
        case ("GET", "metrics"):
            await reply(send, 200, _metrics(runtime), kind=b"text/plain; version=0.0.4")
        case ("POST", "endings"):
            await reply_json(send, {"ended": _endings(runtime, _parsed(body))})
        case ("GET", "sessions", session_id, "log"):
            text = await _log(runtime, session_id, _number(query, "offset", 0))
            await reply(send, 200, text, kind=b"text/plain; charset=utf-8")
        case ("DELETE", "sessions", session_id):
            grace_s = _number(query, "grace_s", None)
            wanted = _complete(session_id, (key[2] for key in runtime.shown.sessions))
            for key in [key for key in runtime.shown.sessions if key[2] == wanted]:  # it may have one at each endpoint
                if runtime.cluster is not None:
                    await runtime.cluster.stop(key, grace_s)
                else:
                    runtime.table.stop(key, grace_s=grace_s)
            await reply_json(send, {"stopped": wanted})
        case ("POST", "agents", name, "reload"):
            record = await runtime.reload(name)
            await reply_json(send, {"agentRuntimeId": record.id, "agentRuntimeVersion": record.latest.number})
        case ("POST", "hide"):
            paths = _parsed(body)
            if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
                raise invalid("a list of paths", reason="CannotParse")
            await reply_json(send, {"agents": runtime.hide(paths)})
        case ("GET", "nodes") if runtime.cluster is not None:
            await reply_json(send, {"nodes": runtime.cluster.nodes()})
        case ("GET", "faults"):
            await reply_json(send, {"injected": runtime.faults.injected, "rules": len(runtime.faults.rules)})
        case ("PUT", "faults"):
            try:
                runtime.faults = FaultPlan.parse(_parsed(body))
            except ConfigError as e:
                raise invalid(str(e), reason="CannotParse") from e
            await reply_json(send, {"rules": len(runtime.faults.rules)})
        case _:
            raise not_found(f"{method} /_local/{'/'.join(path)}")


def _endings(runtime: Runtime, asked: Any) -> dict[str, dict[str, Any]]:
    """How sessions ended. Raises: WireError 400."""
    if not isinstance(asked, dict) or not isinstance(asked.get("sessions"), list):
        raise invalid('an object with "agentRuntimeArn" and "sessions"', reason="CannotParse")
    if len(asked["sessions"]) > MAX_ASKED:
        raise invalid(f"at most {MAX_ASKED} sessions", field="sessions")
    qualifier = asked.get("qualifier")
    route = Route("", str(asked.get("agentRuntimeArn")), {"qualifier": str(qualifier)} if qualifier else {})
    return endings_of(
        runtime.shown.sessions,
        runtime.shown.ended,
        route.named.runtime_id,
        route.qualifier,
        [str(name) for name in asked["sessions"]],
    )


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body or b"[]")
    except ValueError as e:
        raise invalid(f"The body is not JSON: {e}", reason="CannotParse") from None


def _number(query: Mapping[str, str], name: str, default: float | None) -> Any:
    """A whole number where there is a default, else seconds from 0 up. Raises: WireError 400."""
    if name not in query:
        return default
    try:
        if default is not None:
            return int(query[name])
        value = float(query[name])
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise invalid(f"{name} must be a number, got {query[name]!r}", field=name)
    return value


def _complete(name: str, known: Iterable[str]) -> str:
    """The id that is this name, or the only one that begins with it. Raises: WireError 404, 400 when it could be several."""
    found = {session_id for session_id in known if session_id.startswith(name)}
    if name in found:
        return name
    if not found:
        raise not_found(f"Session {name}")
    if len(found) > 1:
        some = ", ".join(sorted(found)[:3])
        raise invalid(f"{len(found)} sessions begin with {name!r} ({some}...): give more of the id", field="session")
    return found.pop()


async def _log(runtime: Runtime, name: str, offset: int) -> bytes:
    """A session's log from an offset on (negative: from its end), live or ended. Raises: WireError 404."""
    live, ended = runtime.shown.describe(), runtime.shown.ended
    wanted = _complete(name, (each["session_id"] for each in (*live, *ended)))
    if runtime.cluster is not None:
        return await runtime.cluster.log(wanted, offset)
    paths = [each["log"] for each in (*live, *reversed(ended)) if each["session_id"] == wanted]
    return read_log(paths[0], offset, LOG_BYTES)


def _metrics(runtime: Runtime) -> bytes:
    states: dict[str, int] = {}
    for session in runtime.shown.describe():
        states[session["state"]] = states.get(session["state"], 0) + 1
    return metrics.render(
        runtime.metrics,
        states=states,
        started=runtime.shown.started_total,
        ended=runtime.shown.ended_total,
        refused=runtime.quotas.refused,
        faults=runtime.faults.injected,
    )
