"""The runtime's HTTP face: a plain ASGI application that maps AWS's paths to sessions and the control plane."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import websockets

from . import callers, control, local_api, sigv4
from .agents import Agent
from .commands import parse_command, run_command
from .connection import break_off
from .core import Runtime
from .direct import DirectInvocations
from .faults import Fault, as_error
from .idempotency import Tokens
from .invoke import INVOKE, Work, new_request_id, relay, request_id_of
from .session import Key, Session
from .shells import Shells, check_shell_id
from .upstream import UpstreamLostError
from .websocket import bridge
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
    trace_headers,
)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Scope = dict[str, Any]

CARD = "invocations/.well-known/agent-card.json"
OPERATIONS = {
    ("POST", "invocations"): INVOKE,
    ("POST", "commands"): "InvokeAgentRuntimeCommand",
    ("POST", "stopruntimesession"): "StopRuntimeSession",
    ("GET", CARD): "GetAgentCard",
}


async def read_body(headers: dict[bytes, bytes], receive: Receive) -> list[bytes]:
    """The request's body in the pieces it came in. Raises: WireError 400 above 100 MB."""
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > MAX_PAYLOAD_BYTES:
        raise _too_large()
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
                raise _too_large()
        if not message.get("more_body"):
            return pieces


def _too_large() -> WireError:
    return invalid(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", field="payload")


async def reply(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), kind: bytes = b"application/json"
) -> None:
    """Send a complete reply."""
    own = [
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        (b"x-amzn-requestid", new_request_id().encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _nowhere(message: dict[str, Any]) -> None:
    return None


class RuntimeApp:
    """ASGI application over a `Runtime`. ``s3``: an ASGI application that gets what arrives on ``s3_port``."""

    def __init__(self, runtime: Runtime, *, s3: Any = None, s3_port: int | None = None) -> None:
        self.runtime = runtime
        self._s3 = s3
        self._s3_port = s3_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = Tokens()
        self._shells = Shells()
        self.direct = DirectInvocations(runtime, self.finish)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif self._s3 is not None and scope["server"][1] == self._s3_port:
            await self._s3(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)

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
        operation, status = "Unknown", 200
        try:
            headers: Headers = scope["headers"]
            body = await read_body(dict(headers), receive)
            if pieces[0] == "_local":
                operation = "Local"
                self._authenticate(scope, body)
                if (scope["method"], *pieces[1:]) not in local_api.OPEN:
                    await self._refuse_sessions(scope)
                await local_api.answer(self.runtime, scope["method"], pieces[1:], query, b"".join(body), send)
                return
            self._authenticate(scope, body)
            route = Route("/".join(pieces[2:]), pieces[1] if len(pieces) > 1 else "", query)
            named = OPERATIONS.get((scope["method"], route.operation)) if pieces[0] == "runtimes" else None
            if named is not None:
                operation = named
                await self._data_plane(operation, route, scope, body, send)
                return
            managed = control.match(scope["method"], pieces)
            if managed is None:
                raise not_found(f"Operation {scope['method']} {scope['path']}")
            operation = managed[0]
            await self._refuse_sessions(scope)
            status = await self._control(managed, scope["query_string"], query, body, send)
        except (WireError, ConnectionResetError, UpstreamLostError) as e:
            status = await _failed(e, scope, send)
        finally:
            self.runtime.metrics.request(operation, status)

    async def finish(self, operation: str, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application but for its first two arguments: what answers a request that `direct` has begun."""
        status = 200
        try:
            await work(scope, send)
        except (WireError, UpstreamLostError) as e:
            status = await _failed(e, scope, send)
        finally:
            self.runtime.metrics.request(operation, status)

    def _authenticate(self, scope: Scope, body: list[bytes]) -> None:
        if self.runtime.config.credentials:
            sigv4.verify(
                self.runtime.config.credentials,
                method=scope["method"],
                raw_path=scope["raw_path"],
                query_string=scope["query_string"],
                headers=scope["headers"],
                body=body,
                now=time.time(),
            )

    async def _refuse_sessions(self, scope: Scope) -> None:
        if not self.runtime.config.credentials:  # else it was signed
            await asyncio.to_thread(callers.refuse_sessions, scope["client"], scope["server"])

    async def _control(
        self,
        managed: tuple[str, str, str],
        query_string: bytes,
        query: Mapping[str, str],
        body: list[bytes],
        send: Send,
    ) -> int:
        operation, runtime, endpoint = managed
        self.runtime.quotas.control(operation, time.monotonic())
        keys = tuple(parse_qs(query_string.decode("latin-1")).get("tagKeys", ()))
        call = control.Call(operation, runtime, endpoint, query, control.parse_body(b"".join(body)), keys)
        status, answer = await self.runtime.control.call(call)
        await reply(send, status, json.dumps(answer).encode() if status != 204 else b"")
        return status

    async def _data_plane(self, operation: str, route: Route, scope: Scope, body: list[bytes], send: Send) -> None:
        headers: Headers = scope["headers"]
        by_name = dict(headers)
        check_headers(by_name)
        session_id = session_id_of(by_name)
        agent = await self.runtime.find(route)
        self.runtime.quotas.request(operation, agent.runtime_id, time.monotonic())
        faults = self._faults(operation, agent)
        if operation == "StopRuntimeSession":
            if session_id is None:
                raise invalid("runtimeSessionId is required", field="runtimeSessionId")
            await self._stop((agent.runtime_id, route.qualifier, session_id), body, send)
            return
        command = parse_command(b"".join(body)) if operation == "InvokeAgentRuntimeCommand" else None
        if any(f.kind == "drop" and f.when == "before" for f in faults):
            await break_off(scope)
            return
        delay_s = sum(f.delay_s for f in faults if f.kind == "slow_start")
        session = await self._acquire(agent, route, session_id, delay_s)
        for fault in faults:
            if fault.kind == "kill":
                asyncio.get_running_loop().call_later(fault.delay_s, session.process.stop, 0.0)
        if command is not None:
            await self._command(session, *command, headers, send)
            return
        path = b"/.well-known/agent-card.json" if operation == "GetAgentCard" else session.agent.invocation_path
        dropped = any(f.kind == "drop" for f in faults)
        if any(f.kind == "duplicate" for f in faults):
            again = await self._acquire(agent, route, session.id, 0.0)
            task = asyncio.create_task(self._twice(again, path, headers, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await relay(
            self.runtime.table,
            session,
            _nowhere if dropped else send,
            method=b"GET" if operation == "GetAgentCard" else b"POST",
            path=path,
            headers=headers,
            body=body,
            request_id=request_id_of(by_name),
            scope=None if dropped else scope,
        )
        if dropped:
            await break_off(scope)

    def _faults(self, operation: str, agent: Agent) -> list[Fault]:
        plan = self.runtime.faults
        if not plan.rules:
            return []
        drawn = plan.draw(operation, agent.name, time.monotonic() - self.runtime.started_s)
        for fault in drawn:
            error = as_error(fault)
            if error is not None:
                raise error
        return drawn

    async def _acquire(self, agent: Agent, route: Route, session_id: str | None, delay_s: float) -> Session:
        wanted = session_id or str(uuid.uuid4())
        return await self.runtime.table.acquire(agent, route.qualifier, wanted, start_delay_s=delay_s)

    async def _stop(self, key: Key, body: list[bytes], send: Send) -> None:
        """A stop whose client token comes again gets the answer of the first one."""

        async def work() -> tuple[int, dict[str, Any]]:
            if self.runtime.table.stop(key) is None:
                raise not_found(f"Session {key[2]}")
            return 200, {}

        token = control.parse_body(b"".join(body)).get("clientToken")
        status, answer = await (self._tokens.answer((key, token), "", work) if isinstance(token, str) else work())
        await reply(send, status, json.dumps(answer).encode(), [(SESSION_HEADER, key[2].encode())])

    async def _command(self, session: Session, text: str, timeout_s: float, headers: Headers, send: Send) -> None:
        try:
            await run_command(session, text, timeout_s, send, trace_headers(headers, ()))
        finally:
            self.runtime.table.release(session)

    async def _twice(self, session: Session, path: bytes, headers: Headers, body: list[bytes]) -> None:
        try:
            await relay(
                self.runtime.table,
                session,
                _nowhere,
                path=path,
                headers=headers,
                body=body,
                request_id=new_request_id(),
            )
        except (WireError, UpstreamLostError):
            return  # the caller sees the first delivery only

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The handshake is refused with the status the error would have had over HTTP."""
        pieces, query = split_path(scope["raw_path"], scope["query_string"])
        operation, status = "WebSocket", 101
        try:
            shell = pieces[2:] == ("ws", "shells")
            if pieces[0] != "runtimes" or not (shell or pieces[2:] == ("ws",)):
                raise not_found(f"Path {scope['path']}")
            operation = "InvokeAgentRuntimeCommandShell" if shell else "WebSocket"
            await receive()  # websocket.connect
            self._authenticate({**scope, "method": "GET"}, [])
            by_name = dict(scope["headers"])
            given = {k.lower().encode(): v.encode() for k, v in query.items()}
            session_id = session_id_of({**given, **by_name})  # presigned addresses carry it in the query
            shell_id = check_shell_id(query.get("shellId") or str(uuid.uuid4()))
            route = Route("ws", pieces[1], query)
            agent = await self.runtime.find(route)
            self.runtime.quotas.request(operation, agent.runtime_id, time.monotonic())
            session = await self._acquire(agent, route, session_id, 0.0)
            try:
                if shell:
                    await self._shells.serve(session, shell_id, receive, send)
                else:
                    await bridge(session, scope["headers"], request_id_of(by_name), receive, send)
            finally:
                self.runtime.table.release(session)
        except WireError as e:
            status = e.status
        except (OSError, websockets.InvalidHandshake):
            status = 424
        finally:
            self.runtime.metrics.request(operation, status)
        if status != 101:
            await _refuse(scope, send, status)


async def _failed(error: Exception, scope: Scope, send: Send) -> int:
    """Tell the caller; where the reply had begun, or the caller is gone, all that is left is to break the connection, so that
    nobody takes it for whole. Returns the status."""
    if isinstance(error, WireError):
        await reply(send, error.status, error.body(), [(b"x-amzn-errortype", error.code.encode())])
        return error.status
    await break_off(scope)
    return 499


async def _refuse(scope: Scope, send: Send, status: int) -> None:
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": status, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1008})
