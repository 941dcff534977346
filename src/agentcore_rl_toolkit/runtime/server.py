"""The runtime's HTTP face: a plain ASGI application that maps AWS's paths to sessions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from .commands import parse_command, run_command
from .core import Runtime
from .invoke import relay
from .sessions import Session
from .upstream import UpstreamLostError
from .wire import (
    MAX_PAYLOAD_BYTES,
    SESSION_HEADER,
    Headers,
    Route,
    WireError,
    check_headers,
    invalid,
    not_found,
    session_id_of,
    split_path,
)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Scope = dict[str, Any]


async def read_body(headers: dict[bytes, bytes], receive: Receive) -> list[bytes]:
    """The request's body in the pieces it came in. Raises: WireError 400 above 100 MB."""
    too_large = invalid(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", field="payload")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > MAX_PAYLOAD_BYTES:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the caller went away while sending")
        piece = message.get("body", b"")
        if piece:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_PAYLOAD_BYTES:
                raise too_large
        if not message.get("more_body"):
            return pieces


async def reply_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Send a complete JSON reply."""
    all_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-amzn-requestid", secrets.token_hex(16).encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def reply_error(send: Send, error: WireError) -> None:
    await reply_json(send, error.status, error.body(), [(b"x-amzn-errortype", error.code.encode())])


class RuntimeApp:
    """ASGI application over a `Runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

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
        pieces, query = split_path(scope["raw_path"], scope["query_string"])
        try:
            if pieces[0] == "runtimes" and len(pieces) >= 3:
                await self._data_plane(Route("/".join(pieces[2:]), pieces[1], query), scope, receive, send)
            elif pieces[0] == "_local":
                await self._local(pieces[1:], send)
            else:
                raise not_found(f"Path {scope['path']}")
        except WireError as e:
            await reply_error(send, e)

    async def _data_plane(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        by_name = dict(headers)
        check_headers(by_name)
        session_id = session_id_of(by_name)
        body = await read_body(by_name, receive)
        agent = self.runtime.find(route)
        if route.operation == "invocations":
            session = await self._session(agent, route, session_id)
            await self._relay(session, headers, body, send)
        elif route.operation == "commands":
            command, timeout = parse_command(b"".join(body))
            session = await self._session(agent, route, session_id)
            try:
                await run_command(session, command, timeout, self.runtime.node.environment(agent), send)
            finally:
                self.runtime.table.release(session)
        elif route.operation == "stopruntimesession":
            if session_id is None:
                raise invalid("runtimeSessionId is required", field="runtimeSessionId")
            if self.runtime.table.stop((agent.runtime_id, route.qualifier, session_id)) is None:
                raise not_found(f"Session {session_id}")
            await reply_json(send, 200, b"{}", [(SESSION_HEADER, session_id.encode())])
        else:
            raise not_found(f"Operation {route.operation}")

    async def _session(self, agent: Any, route: Route, session_id: str | None) -> Session:
        return await self.runtime.table.acquire(agent, route.qualifier, session_id or _new_session_id())

    async def _relay(self, session: Session, headers: Headers, body: list[bytes], send: Send) -> None:
        try:
            await relay(self.runtime.table, session, send, headers=headers, body=body)
        except UpstreamLostError as e:
            # The reply had begun: all that is left is to break the connection, so the caller sees it is incomplete.
            raise ConnectionResetError(str(e)) from e

    async def _local(self, path: list[str], send: Send) -> None:
        if path == ["sessions"]:
            answer = {"sessions": self.runtime.table.describe(), "ended": list(self.runtime.table.ended)}
        elif path == ["status"]:
            answer = self.runtime.status()
        else:
            raise not_found("/_local/" + "/".join(path))
        await reply_json(send, 200, json.dumps(answer).encode())


def _new_session_id() -> str:
    import uuid

    return str(uuid.uuid4())
