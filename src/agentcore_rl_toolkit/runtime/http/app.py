"""The runtime's ASGI application: checks each request, routes it, and turns errors into AWS's."""

from __future__ import annotations

import asyncio
import uuid

from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from ..._servers import sigv4
from ..._servers.host_check import HostCheck
from ..._servers.process import break_off
from ..launcher.connection import UpstreamLostError, header
from ..runtime import Runtime
from ..wire import MAX_PAYLOAD_BYTES, REQUEST_ID_HEADER, WireError, invalid, not_found
from . import control, data_plane, local_api
from .responses import AWS_REQUEST_ID, as_wire_error

BROKEN_OFF = 499  # the status in metrics when the caller disconnected or got a part of the response


class RuntimeApp:
    """ASGI application over a `Runtime`. ``hosts``: the check of Host and Origin. None: none.

    ``scope`` has the request's ``runtime.body``, ``runtime.request_id``, and for the metrics ``runtime.operation``.
    """

    def __init__(self, runtime: Runtime, hosts: HostCheck | None = None) -> None:
        self.runtime, self._hosts = runtime, hosts
        self._routes = [*data_plane.routes(runtime), *local_api.routes(runtime), *control.routes(runtime)]

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
            refusal = self._hosts.refusal_of(scope["headers"]) if self._hosts is not None else None
            if refusal is not None:
                raise WireError("AccessDeniedException", refusal.message, status=refusal.status)
            scope["runtime.body"] = await read_body(scope, receive)
            self._check_signature(scope)
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
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                scope["runtime.operation"] = route.name
                return await route.handle(scope, receive, send)
        raise not_found(f"Operation {scope['method']} {scope['path']}")

    def _check_signature(self, scope: Scope) -> None:
        credentials = self.runtime.config.credentials
        if credentials and not sigv4.has_password(credentials, header(scope["headers"], b"authorization")):
            refusal = sigv4.refusal(credentials, scope, scope["runtime.body"])
            if refusal is not None:
                raise WireError("AccessDeniedException", refusal)


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the request's body. Raises: WireError 400 above 100 MB, ConnectionResetError."""
    size, body, more = int(header(scope["headers"], b"content-length") or b"0"), bytearray(), True
    while more and size <= MAX_PAYLOAD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the caller disconnected while sending")
        body += message.get("body", b"")
        size, more = max(size, len(body)), message.get("more_body", False)
    if size > MAX_PAYLOAD_BYTES:
        raise invalid(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", field="payload")
    return bytes(body)
