"""`/_local/...`, routes that AWS does not have: sessions, logs, metrics, status, faults."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ...errors import ConfigError
from .. import metrics
from ..api.faults import FaultPlan
from ..runtime import Runtime
from ..wire import invalid, not_found, parse_target
from .responses import json_of

LOG_BYTES = 1_000_000
MAX_ASKED = 10_000  # sessions in one request
Endpoint = Callable[[Request], Awaitable[Response]]


def routes(runtime: Runtime) -> Iterator[tuple[str, str, str, Endpoint]]:
    """Yield path, method, operation and endpoint of each route."""
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
        yield f"/_local/{path}", method, "Local", endpoint


class LocalApi:
    """The endpoints. Each raises WireError 400 or 404."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def sessions(self, request: Request) -> Response:
        table = self.runtime.table
        return JSONResponse({"sessions": table.describe(), "ended": list(table.ended)})

    async def status(self, request: Request) -> Response:
        return JSONResponse(self.runtime.status())

    async def metrics(self, request: Request) -> Response:
        runtime = self.runtime
        text = metrics.render(
            runtime.metrics,
            states=Counter(session["state"] for session in runtime.table.describe()),
            started=runtime.table.started_total,
            ended=runtime.table.ended_total,
            refused=runtime.quotas.refused,
            faults=runtime.faults.injected,
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def endings(self, request: Request) -> Response:
        asked = json_of(request)
        if not isinstance(asked, dict) or not isinstance(asked.get("sessions"), list):
            raise invalid('an object with "agentRuntimeArn" and "sessions"', reason="CannotParse")
        if len(asked["sessions"]) > MAX_ASKED:
            raise invalid(f"at most {MAX_ASKED} sessions", field="sessions")
        qualifier = {"qualifier": str(asked["qualifier"])} if asked.get("qualifier") else {}
        target = parse_target(str(asked.get("agentRuntimeArn")), qualifier)
        names = [str(name) for name in asked["sessions"]]
        return JSONResponse({"ended": self.runtime.table.endings(target.runtime_id, target.endpoint, names)})

    async def log(self, request: Request) -> Response:
        """Return a session's log from an offset on (negative: from its end), live or ended."""
        try:
            offset = int(request.query_params.get("offset", "0"))
        except ValueError:
            raise invalid("offset must be a whole number", field="offset") from None
        table = self.runtime.table
        known = [*table.describe(), *reversed(table.ended)]
        wanted = _complete(request, (session["session_id"] for session in known))
        session = next(session for session in known if session["session_id"] == wanted)
        return PlainTextResponse(await self.runtime.launcher.read_log(session, offset, LOG_BYTES))

    async def stop(self, request: Request) -> Response:
        given = request.query_params.get("grace_s")
        if given is not None and not re.fullmatch(r"\d{1,9}(\.\d+)?", given):
            raise invalid(f"grace_s must be a number, got {given!r}", field="grace_s")
        grace_s = None if given is None else float(given)
        sessions = self.runtime.table.sessions
        wanted = _complete(request, (key[2] for key in sessions))
        for key in [key for key in sessions if key[2] == wanted]:  # it may have one at each endpoint
            self.runtime.table.stop(key, grace_s=grace_s)
        return JSONResponse({"stopped": wanted})

    async def reload(self, request: Request) -> Response:
        record = self.runtime.reload(request.path_params["name"])
        return JSONResponse({"agentRuntimeId": record.id, "agentRuntimeVersion": record.latest.version})

    async def hide(self, request: Request) -> Response:
        paths = json_of(request)
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise invalid("the body must be a list of paths", reason="CannotParse")
        return JSONResponse({"agents": self.runtime.hide(paths)})

    async def nodes(self, request: Request) -> Response:
        nodes = getattr(self.runtime.launcher, "nodes", None)
        if nodes is None:
            raise not_found("GET /_local/nodes")
        return JSONResponse({"nodes": nodes()})

    async def faults(self, request: Request) -> Response:
        plan = self.runtime.faults
        return JSONResponse({"injected": plan.injected, "rules": len(plan.rules)})

    async def set_faults(self, request: Request) -> Response:
        given = json_of(request)
        try:
            self.runtime.faults = FaultPlan.parse([] if given is None else given)
        except ConfigError as e:
            raise invalid(str(e), reason="CannotParse") from e
        return JSONResponse({"rules": len(self.runtime.faults.rules)})


def _complete(request: Request, known: Iterable[str]) -> str:
    """Return the session id in the path, or the only id that begins like it. Raises: WireError 404, and 400 for several ids."""
    name = request.path_params["session"]
    found = {session_id for session_id in known if session_id.startswith(name)}
    if name in found:
        return str(name)
    if not found:
        raise not_found(f"Session {name}")
    if len(found) > 1:
        some = ", ".join(sorted(found)[:3])
        raise invalid(
            f"{len(found)} sessions begin with {name!r} ({some}...): give more characters of the id", field="session"
        )
    return found.pop()
