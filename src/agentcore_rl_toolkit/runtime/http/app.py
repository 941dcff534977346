"""The runtime's ASGI application: checks each request, routes it, and turns errors into AWS's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from ..._servers import sigv4
from ..._servers.host_check import HostCheck
from ..._servers.process import break_off
from ..launcher.connection import UpstreamLostError, header
from ..runtime import Runtime
from ..wire import MAX_PAYLOAD_BYTES, REQUEST_ID_HEADER, WireError, invalid, not_found
from . import control, local_api
from .data_plane import OPERATIONS, SessionOperation
from .responses import AWS_REQUEST_ID, as_wire_error

BROKEN_OFF = 499  # the status in metrics when the caller disconnected or got a part of the response


class RuntimeApp:
    """ASGI application over a `Runtime`. ``hosts``: the check of Host and Origin. None: none.

    ``scope`` has the request's ``runtime.body``, ``runtime.request_id``, and for the metrics ``runtime.operation``.
    """

    def __init__(self, runtime: Runtime, hosts: HostCheck | None = None) -> None:
        self.runtime = runtime
        self._hosts = hosts
        routes = [_Route(path, "POST", name, SessionOperation(runtime, name)) for path, name in OPERATIONS.items()]
        routes += [_Route(*each) for each in (*local_api.routes(runtime), *control.routes(runtime))]
        self._router = Router(routes, redirect_slashes=False, default=_no_such_operation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        given = header(scope["headers"], REQUEST_ID_HEADER)
        request_id = scope["runtime.request_id"] = given or str(uuid.uuid4()).encode()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (AWS_REQUEST_ID, request_id)]
            await send(message)

        scope["path"] = scope["path"].rstrip("/")
        try:
            self._check_host(scope)
            body = scope["runtime.body"] = await read_body(scope, receive)
            self._check_signature(scope, body)
            await self.respond(scope, receive, send_named)
        except (ConnectionResetError, UpstreamLostError):
            status = BROKEN_OFF
            await break_off(send)
        except (Exception, asyncio.CancelledError) as e:
            error, begun = as_wire_error(e), status
            status = error.status
            if begun:  # a client must not take a part of a response for all of it
                await break_off(send)
            else:
                headers = {"x-amzn-errortype": error.code}
                await Response(error.body(), error.status, headers, "application/json")(scope, receive, send_named)
        finally:
            self.runtime.metrics.requests[scope.get("runtime.operation", "Unknown"), status] += 1

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request that was checked. Raises: WireError."""
        await self._router(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Check Host and Origin. Raises: WireError 403, 421."""
        refusal = self._hosts.refusal_of(scope["headers"]) if self._hosts is not None else None
        if refusal is not None:
            raise WireError("AccessDeniedException", refusal.message, status=refusal.status)

    def _check_signature(self, scope: Scope, body: bytes) -> None:
        """Check the signature. Raises: WireError 403."""
        credentials = self.runtime.config.credentials
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
    """A route of one method, which sets the name of its operation. AWS has no 405: another route may have the other methods."""

    def __init__(self, path: str, method: str, operation: str, endpoint: Callable[..., Any]) -> None:
        super().__init__(path, endpoint, methods=[method])
        self._operation = operation

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (
            (Match.FULL, {**child, "runtime.operation": self._operation}) if match is Match.FULL else (Match.NONE, {})
        )


async def _no_such_operation(scope: Scope, receive: Receive, send: Send) -> None:
    raise not_found(f"Operation {scope['method']} {scope['path']}")


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the request's body. Raises: WireError 400 above 100 MB, ConnectionResetError."""
    declared = header(scope["headers"], b"content-length") or b"0"
    size = int(declared) if declared.isdigit() else 0
    pieces: list[bytes] = []
    received, more = 0, size <= MAX_PAYLOAD_BYTES
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the caller disconnected while sending")
        pieces.append(message.get("body", b""))
        received += len(pieces[-1])
        more = message.get("more_body", False) and received <= MAX_PAYLOAD_BYTES
    if max(size, received) > MAX_PAYLOAD_BYTES:
        raise invalid(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", field="payload")
    return b"".join(pieces)
