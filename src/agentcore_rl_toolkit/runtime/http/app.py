"""The runtime's ASGI application: checks each request, routes it, and turns errors into AWS's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from ..._servers import sigv4
from ..._servers.host_check import HostCheck
from ..runtime import Runtime
from ..sessions.connection import header
from ..wire import WireError, not_found
from . import control, local_api
from .data_plane import COMMAND, INVOKE, STOP, DataPlane
from .responses import failed, read_body, refusal_error

OPERATIONS = {"invocations": INVOKE, "commands": COMMAND, "stopruntimesession": STOP}


class RuntimeApp:
    """ASGI application over a `Runtime`. ``hosts``: the check of Host and Origin; None: none.

    Endpoints are ASGI applications. ``scope["runtime.body"]`` holds the body, in the pieces it came in. An endpoint sets
    ``scope["runtime.operation"]`` for the metrics.
    """

    def __init__(self, runtime: Runtime, hosts: HostCheck | None = None) -> None:
        self.runtime = runtime
        self._hosts = hosts
        data_plane = DataPlane(runtime)
        routes = [
            _Route(f"/runtimes/{{runtime:path}}/{path}", _operation(name, data_plane.endpoint(name)), methods=["POST"])
            for path, name in OPERATIONS.items()
        ]
        routes += [
            _Route(path, _operation(name, endpoint), methods=[method])
            for method, path, name, endpoint in (*local_api.routes(runtime), *control.routes(runtime))
        ]
        self._router = Router(routes, redirect_slashes=False, default=_no_such_operation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.runtime.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200

        async def send_counted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        scope["path"] = scope["path"].rstrip("/")
        try:
            refusal = self._hosts.refusal_of(scope["headers"]) if self._hosts is not None else None
            if refusal is not None:
                raise refusal_error(refusal)
            body = scope["runtime.body"] = await read_body(dict(scope["headers"]), receive)
            self._check_signature(scope, b"".join(body))
            await self.respond(scope, receive, send_counted)
        except (Exception, asyncio.CancelledError) as e:
            status = await failed(e, send)
        finally:
            self.runtime.metrics.request(scope.get("runtime.operation", "Unknown"), status)

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request that was checked. Raises: WireError."""
        await self._router(scope, receive, send)

    def _check_signature(self, scope: Scope, body: bytes) -> None:
        """Raises: WireError 403."""
        credentials: Mapping[str, str] = self.runtime.config.credentials
        if not credentials or sigv4.has_password(credentials, header(scope["headers"], b"authorization")):
            return
        refusal = sigv4.refusal(
            credentials,
            method=scope["method"],
            path=scope["raw_path"].partition(b"?")[0].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=scope["headers"],
            body=body,
            now=time.time(),
        )
        if refusal is not None:
            raise WireError("AccessDeniedException", refusal)


class _Route(Route):
    """A route that does not answer other methods: another route may, and AWS has no 405."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = super().matches(scope)
        return (Match.NONE, {}) if found[0] is Match.PARTIAL else found


class _operation:  # noqa: N801  # an ASGI application, which Starlette does not wrap as it does functions
    def __init__(self, name: str, endpoint: Any) -> None:
        self._name, self._endpoint = name, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["runtime.operation"] = self._name
        await self._endpoint(scope, send)


async def _no_such_operation(scope: Scope, receive: Receive, send: Send) -> None:
    raise not_found(f"Operation {scope['method']} {scope['path']}")
