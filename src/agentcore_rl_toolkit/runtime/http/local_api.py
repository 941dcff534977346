"""`/_local/...`, routes that AWS does not have: sessions, logs, metrics, status, faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...errors import ConfigError
from ..api.faults import FaultPlan
from ..runtime import Runtime
from ..wire import invalid, not_found, parse_target
from .responses import json_of, object_of

LOG_BYTES = 1_000_000


def routes(runtime: Runtime) -> list[Route]:
    """Return the routes."""
    api = LocalApi(runtime)
    found = (
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
    )
    return [Route(f"/_local/{path}", endpoint, methods=[method], name="Local") for method, path, endpoint in found]


class LocalApi:
    """The endpoints. Each raises WireError 400 or 404."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.table = runtime, runtime.table

    async def sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": self.table.describe(), "ended": list(self.table.ended)})

    async def status(self, request: Request) -> Response:
        return JSONResponse(self.runtime.status())

    async def metrics(self, request: Request) -> Response:
        table, refused, injected = self.table, self.runtime.quotas.refused, self.runtime.faults.injected
        states = Counter(session["state"] for session in table.describe())
        text = self.runtime.metrics.render(states, table.started_total, table.ended_total, refused, injected)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def endings(self, request: Request) -> Response:
        asked = object_of(request)
        target = parse_target(asked["agentRuntimeArn"], asked)
        return JSONResponse({"ended": self.table.endings(target.runtime_id, target.endpoint, asked["sessions"])})

    async def log(self, request: Request) -> Response:
        """Return a session's log from an offset on (negative: from its end), live or ended."""
        offset = int(request.query_params.get("offset", "0"))
        known = {session["session_id"]: session for session in (*self.table.ended, *self.table.describe())}
        session = known[_complete(request, known)]
        return PlainTextResponse(await self.runtime.launcher.read_log(session, offset, LOG_BYTES))

    async def stop(self, request: Request) -> Response:
        wanted = _complete(request, (key[2] for key in self.table.sessions))
        for key in [key for key in self.table.sessions if key[2] == wanted]:  # it may have one at each endpoint
            self.table.stop(key)
        return JSONResponse({"stopped": wanted})

    async def reload(self, request: Request) -> Response:
        record = self.runtime.reload(request.path_params["name"])
        return JSONResponse({"agentRuntimeId": record.id, "agentRuntimeVersion": record.latest.version})

    async def hide(self, request: Request) -> Response:
        return JSONResponse({"agents": self.runtime.hide(json_of(request))})

    async def nodes(self, request: Request) -> Response:
        nodes = getattr(self.runtime.launcher, "nodes", None)
        if nodes is None:
            raise not_found("GET /_local/nodes")
        return JSONResponse({"nodes": nodes()})

    async def faults(self, request: Request) -> Response:
        plan = self.runtime.faults
        return JSONResponse({"injected": plan.injected, "rules": len(plan.rules)})

    async def set_faults(self, request: Request) -> Response:
        try:
            self.runtime.faults = FaultPlan.parse(json_of(request) or [])
        except ConfigError as e:
            raise invalid(str(e), reason="CannotParse") from e
        return JSONResponse({"rules": len(self.runtime.faults.rules)})


def _complete(request: Request, known: Iterable[str]) -> str:
    """Return the session id in the path, or the only id that begins like it. Raises: WireError 404, and 400 for several ids."""
    name: str = request.path_params["session"]
    found = sorted({session_id for session_id in known if session_id.startswith(name)})
    if not found:
        raise not_found(f"Session {name}")
    if len(found) > 1 and name not in found:
        few = ", ".join(found[:3])
        raise invalid(f"{len(found)} sessions begin with {name!r} ({few}...): give more characters", field="session")
    return found[0]
