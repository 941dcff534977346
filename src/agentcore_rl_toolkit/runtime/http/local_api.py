"""`/_local/...`, routes that AWS does not have: sessions, logs, metrics, status, faults."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from starlette.types import Scope, Send

from ..._parsing import parse_json
from ...errors import ConfigError
from .. import metrics
from ..api.faults import FaultPlan
from ..launcher.session_log import read_log
from ..runtime import Runtime
from ..sessions.session import MAX_ASKED, endings_of
from ..wire import Target, invalid, not_found
from .responses import query_of, reply, reply_json

LOG_BYTES = 1_000_000
Endpoint = Callable[[Scope, Send], Awaitable[None]]
PLAIN = b"text/plain; charset=utf-8"


def routes(runtime: Runtime) -> Iterator[tuple[str, str, str, Endpoint]]:
    """Method, path, name and endpoint of each."""
    api = LocalApi(runtime)
    for method, path, endpoint in (
        ("GET", "sessions", api.sessions),
        ("GET", "status", api.status),
        ("GET", "metrics", api.metrics),
        ("POST", "endings", api.endings),
        ("GET", "sessions/{session:path}/log", api.log),
        ("DELETE", "sessions/{session:path}", api.stop),
        ("POST", "agents/{name}/reload", api.reload),
        ("POST", "hide", api.hide),
        ("GET", "nodes", api.nodes),
        ("GET", "faults", api.faults),
        ("PUT", "faults", api.set_faults),
    ):
        yield method, f"/_local/{path}", "Local", endpoint


class LocalApi:
    """The endpoints. Each raises WireError 400 or 404."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def sessions(self, scope: Scope, send: Send) -> None:
        if self.runtime.cluster is not None:
            await self.runtime.cluster.refresh()
        shown = self.runtime.shown
        await reply_json(send, {"sessions": shown.describe(), "ended": list(shown.ended)})

    async def status(self, scope: Scope, send: Send) -> None:
        await reply_json(send, self.runtime.status())

    async def metrics(self, scope: Scope, send: Send) -> None:
        runtime, states = self.runtime, dict[str, int]()
        for session in runtime.shown.describe():
            states[session["state"]] = states.get(session["state"], 0) + 1
        text = metrics.render(
            runtime.metrics,
            states=states,
            started=runtime.shown.started_total,
            ended=runtime.shown.ended_total,
            refused=runtime.quotas.refused,
            faults=runtime.faults.injected,
        )
        await reply(send, 200, text, kind=b"text/plain; version=0.0.4")

    async def endings(self, scope: Scope, send: Send) -> None:
        asked = _parsed(scope)
        if not isinstance(asked, dict) or not isinstance(asked.get("sessions"), list):
            raise invalid('an object with "agentRuntimeArn" and "sessions"', reason="CannotParse")
        if len(asked["sessions"]) > MAX_ASKED:
            raise invalid(f"at most {MAX_ASKED} sessions", field="sessions")
        qualifier = asked.get("qualifier")
        target = Target(str(asked.get("agentRuntimeArn")), {"qualifier": str(qualifier)} if qualifier else {})
        shown, names = self.runtime.shown, [str(name) for name in asked["sessions"]]
        found = endings_of(shown.sessions, shown.ended, target.named.runtime_id, target.qualifier, names)
        await reply_json(send, {"ended": found})

    async def log(self, scope: Scope, send: Send) -> None:
        """A session's log from an offset on (negative: from its end), live or ended."""
        offset = _number(query_of(scope), "offset", 0)
        live, ended = self.runtime.shown.describe(), self.runtime.shown.ended
        wanted = _complete(scope["path_params"]["session"], (each["session_id"] for each in (*live, *ended)))
        if self.runtime.cluster is not None:
            text = await self.runtime.cluster.log(wanted, offset)
        else:
            paths = [each["log"] for each in (*live, *reversed(ended)) if each["session_id"] == wanted]
            text = read_log(paths[0], offset, LOG_BYTES)
        await reply(send, 200, text, kind=PLAIN)

    async def stop(self, scope: Scope, send: Send) -> None:
        grace_s = _number(query_of(scope), "grace_s", None)
        known = self.runtime.shown.sessions
        wanted = _complete(scope["path_params"]["session"], (key[2] for key in known))
        for key in [key for key in known if key[2] == wanted]:  # it may have one at each endpoint
            if self.runtime.cluster is not None:
                await self.runtime.cluster.stop(key, grace_s)
            else:
                self.runtime.table.stop(key, grace_s=grace_s)
        await reply_json(send, {"stopped": wanted})

    async def reload(self, scope: Scope, send: Send) -> None:
        record = await self.runtime.reload(scope["path_params"]["name"])
        await reply_json(send, {"agentRuntimeId": record.id, "agentRuntimeVersion": record.latest.number})

    async def hide(self, scope: Scope, send: Send) -> None:
        paths = _parsed(scope)
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise invalid("a list of paths", reason="CannotParse")
        await reply_json(send, {"agents": self.runtime.hide(paths)})

    async def nodes(self, scope: Scope, send: Send) -> None:
        if self.runtime.cluster is None:
            raise not_found("GET /_local/nodes")
        await reply_json(send, {"nodes": self.runtime.cluster.nodes()})

    async def faults(self, scope: Scope, send: Send) -> None:
        plan = self.runtime.faults
        await reply_json(send, {"injected": plan.injected, "rules": len(plan.rules)})

    async def set_faults(self, scope: Scope, send: Send) -> None:
        try:
            self.runtime.faults = FaultPlan.parse(_parsed(scope))
        except ConfigError as e:
            raise invalid(str(e), reason="CannotParse") from e
        await reply_json(send, {"rules": len(self.runtime.faults.rules)})


def _parsed(scope: Scope) -> Any:
    try:
        return parse_json(b"".join(scope["runtime.body"]) or b"[]")
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
