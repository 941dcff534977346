"""The runtime's HTTP face: a plain ASGI application that maps AWS's paths to sessions and the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs

import websockets

from ..._servers.callers import USER, Caller, Callers
from ..agents.agent import Agent
from ..api import control, signatures
from ..api.faults import INIT_TIMEOUT, Effects
from ..api.idempotency import Tokens
from ..runtime import Runtime
from ..sessions.connection import UpstreamLostError
from ..sessions.session import Key, Session
from ..wire import (
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
from . import local_api
from .admission import HOW, refuse_management
from .commands import parse_command, run_command
from .fast_path import DirectInvocations
from .invoke import AWS_REQUEST_ID, INVOKE, Work, new_request_id, relay, request_id_of
from .protocol import Receive, Send, break_off, hang_up
from .responses import Receiving, as_wire_error, failed, read_body, reply
from .shells import Shells, check_shell_id
from .websocket import bridge, with_query

Scope = dict[str, Any]

CARD = "invocations/.well-known/agent-card.json"
OPERATIONS = {
    ("POST", "invocations"): INVOKE,
    ("POST", "commands"): "InvokeAgentRuntimeCommand",
    ("POST", "stopruntimesession"): "StopRuntimeSession",
    ("GET", CARD): "GetAgentCard",
}


async def _nowhere(message: dict[str, Any]) -> None:
    return None


class RuntimeApp:
    """ASGI application over a `Runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = Tokens()
        self._receiving = Receiving()
        self._shells = Shells()
        self.callers: Callers[Session] = Callers(self._sessions_here)
        self.direct = DirectInvocations(runtime, self.callers, self.finish)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.runtime.close()
                self.callers.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces, query = split_path(scope["raw_path"], scope["query_string"])
        operation, status = "Unknown", 200
        try:
            caller = await self._caller(scope)
            if pieces[0] == "_local":
                operation = "Local"
                if (scope["method"], *pieces[1:]) not in local_api.OPEN:
                    refuse_management(caller)
                body = await self._body(scope, receive)
                await local_api.answer(
                    self.runtime, scope["method"], pieces[1:], query, b"".join(body), send, caller=caller
                )
                return
            route = Route("/".join(pieces[2:]), pieces[1] if len(pieces) > 1 else "", query)
            named = OPERATIONS.get((scope["method"], route.operation)) if pieces[0] == "runtimes" else None
            if named is not None:
                operation = named
                self._admit(caller, route, scope["headers"])
                body = await self._body(scope, receive)
                await self._data_plane(operation, route, scope, body, send, caller)
                return
            managed = control.match(scope["method"], pieces)
            if managed is not None:
                operation = managed[0]
                refuse_management(caller)
            body = await self._body(scope, receive)
            if managed is None:
                raise not_found(f"Operation {scope['method']} {scope['path']}")
            status = await self._control(managed, scope["query_string"], query, body, send)
        except (Exception, asyncio.CancelledError) as e:
            status = await failed(e, scope, send)
        finally:
            self.runtime.metrics.request(operation, status)

    async def finish(self, operation: str, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application but for its first two arguments: what answers a request that `fast_path` has begun."""
        status = 200
        try:
            await work(scope, send)
        except (Exception, asyncio.CancelledError) as e:
            status = await failed(e, scope, send)
        finally:
            self.runtime.metrics.request(operation, status)

    def _authenticate(self, scope: Scope) -> signatures.Pending | None:
        """Check the signature as far as the head tells; None where requests are not signed. Raises: WireError 403."""
        if not self.runtime.config.credentials:
            return None
        return signatures.begin(
            self.runtime.config.credentials,
            method=scope["method"],
            raw_path=scope["raw_path"],
            query_string=scope["query_string"],
            headers=scope["headers"],
            now=time.time(),
        )

    async def _body(self, scope: Scope, receive: Receive) -> list[bytes]:
        """The body of a request whose signature, where there is to be one, is checked: before it is read, if it can be."""
        signature = self._authenticate(scope)
        unproven = None if signature is None or signature.proven else self._receiving
        body = await read_body(dict(scope["headers"]), receive, self.runtime.config.times.body_timeout_s, unproven)
        if signature is not None:
            signature.finish(body)
        return body

    def _sessions_here(self) -> Iterable[Session]:
        return self.runtime.table.sessions.values() if self.runtime.cluster is None else ()

    async def _caller(self, scope: Scope) -> Caller[Session]:
        """Who sends: asked once per connection. Where requests are signed, the signature says it."""
        if self.runtime.config.credentials:
            return USER
        return await self.callers.of_scope(scope)

    def _admit(self, caller: Caller[Session], route: Route, headers: Headers) -> None:
        """Whether this caller may do something with this session. Raises: WireError 403 with the reason."""
        if caller.is_user or (self.runtime.config.callers == "any" and not caller.confined):
            return
        session = caller.session
        if session is None:
            raise WireError("AccessDeniedException", f"Calling this runtime is not open to {caller.reason}; {HOW}.")
        key = (route.named.runtime_id, route.qualifier, session_id_of(dict(headers)))
        if key == session.key and not session.over:
            return
        if self.runtime.config.session_calls == "started":
            other = self.runtime.table.sessions.get(key) if key[2] is not None else None  # type: ignore[arg-type]
            if other is None or other.started_by is session:
                return
        raise WireError(
            "AccessDeniedException",
            "A session may call its own session only. Where agents call agents, start the runtime with --session-calls started: "
            "then a session may also start sessions, and call those.",
        )

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

    async def _data_plane(
        self, operation: str, route: Route, scope: Scope, body: list[bytes], send: Send, caller: Caller[Session]
    ) -> None:
        headers: Headers = scope["headers"]
        by_name = dict(headers)
        check_headers(by_name)
        session_id = session_id_of(by_name)
        agent = await self.runtime.find(route)
        self.runtime.quotas.request(operation, agent.runtime_id, time.monotonic())
        key = (agent.runtime_id, route.qualifier, session_id or str(uuid.uuid4()))
        effects = self._effects(operation, agent, key)
        if effects.drop == "before":
            await break_off(scope)
            return
        if effects.drop == "after":
            await self._work(operation, agent, key, session_id, scope, body, _nowhere, effects, caller)
            await break_off(scope)
        elif effects.partial_bytes is not None:
            cut = _cut(scope, send, effects.partial_bytes)
            await self._work(operation, agent, key, session_id, scope, body, cut, effects, caller)
        else:
            await self._work(operation, agent, key, session_id, scope, body, send, effects, caller)

    async def _work(
        self,
        operation: str,
        agent: Agent,
        key: Key,
        session_id: str | None,
        scope: Scope,
        body: list[bytes],
        send: Send,
        effects: Effects,
        caller: Caller[Session],
    ) -> None:
        headers: Headers = scope["headers"]
        if operation == "StopRuntimeSession":
            if session_id is None:
                raise invalid("runtimeSessionId is required", field="runtimeSessionId")
            await self._stop(key, body, send)
            return
        command = parse_command(b"".join(body)) if operation == "InvokeAgentRuntimeCommand" else None
        if operation == INVOKE:
            self.runtime.check_store(body)
        session = await self._acquire(agent, key, effects, caller)
        if command is not None:
            await self._command(session, *command, headers, send)
            return
        if effects.duplicate:
            again = await self._acquire(agent, key, Effects(), caller)
            task = asyncio.create_task(self._twice(again, headers, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        card = operation == "GetAgentCard"
        await relay(
            self.runtime.table,
            session,
            send,
            method=b"GET" if card else b"POST",
            path=b"/.well-known/agent-card.json" if card else session.agent.invocation_path,
            headers=headers,
            body=body,
            request_id=request_id_of(dict(headers)),
            scope=scope if effects.drop is None and effects.partial_bytes is None else None,
        )

    def _effects(self, operation: str, agent: Agent, key: Key) -> Effects:
        plan = self.runtime.faults
        if not plan.rules:
            return Effects()
        uptime_s = time.monotonic() - self.runtime.started_s
        return Effects(plan.draw(operation, agent.name, uptime_s, starts=key not in self.runtime.table.sessions))

    async def _acquire(self, agent: Agent, key: Key, effects: Effects, caller: Caller[Session]) -> Session:
        if effects.init_timeout_s is not None:
            await asyncio.sleep(effects.init_timeout_s)
            raise WireError("RuntimeClientError", INIT_TIMEOUT.format(self.runtime.config.times.init_timeout_s))
        _, endpoint, session_id = key
        session = await self.runtime.table.acquire(
            agent, endpoint, session_id, start_delay_s=effects.start_delay_s, started_by=caller.session
        )
        for delay_s in effects.kills_s:
            asyncio.get_running_loop().call_later(delay_s, session.process.stop, 0.0)
        return session

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
            more = [*trace_headers(headers, ()), (AWS_REQUEST_ID, request_id_of(dict(headers)).encode())]
            await run_command(session, text, timeout_s, send, more)
        finally:
            self.runtime.table.release(session)

    async def _twice(self, session: Session, headers: Headers, body: list[bytes]) -> None:
        try:
            await relay(
                self.runtime.table,
                session,
                _nowhere,
                path=session.agent.invocation_path,
                headers=headers,
                body=body,
                request_id=new_request_id(),
            )
        except (WireError, UpstreamLostError):
            return  # the caller sees the first delivery only

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The handshake is refused with the status the error would have had over HTTP."""
        pieces, query = split_path(scope["raw_path"], scope["query_string"])
        operation, error = "WebSocket", None
        try:
            shell = pieces[2:] == ("ws", "shells")
            if pieces[0] != "runtimes" or not (shell or pieces[2:] == ("ws",)):
                raise not_found(f"Path {scope['path']}")
            operation = "InvokeAgentRuntimeCommandShell" if shell else "WebSocket"
            await receive()  # websocket.connect
            caller = await self._caller(scope)
            signature = self._authenticate({**scope, "method": "GET"})
            if signature is not None:
                signature.finish([])
            headers = with_query(scope["headers"], query)
            by_name = dict(headers)
            route = Route("ws", pieces[1], query)
            self._admit(caller, route, headers)
            session_id = session_id_of(by_name)
            shell_id = check_shell_id(query.get("shellId") or str(uuid.uuid4()))
            agent = await self.runtime.find(route)
            self.runtime.quotas.request(operation, agent.runtime_id, time.monotonic())
            key = (agent.runtime_id, route.qualifier, session_id or str(uuid.uuid4()))
            session = await self._acquire(agent, key, self._effects(operation, agent, key), caller)
            try:
                if shell:
                    await self._shells.serve(session, shell_id, receive, send)
                else:
                    await bridge(session, headers, request_id_of(by_name), scope["subprotocols"], receive, send)
            finally:
                self.runtime.table.release(session)
        except (OSError, websockets.InvalidHandshake) as e:
            error = WireError("RuntimeClientError", f"The agent took no WebSocket: {e}")
        except Exception as e:
            error = as_wire_error(e)
        self.runtime.metrics.request(operation, 101 if error is None else error.status)
        if error is not None:
            await _refuse(scope, send, error)


def _cut(scope: Scope, send: Send, after_bytes: int) -> Send:
    """Sends so many bytes of a body, then ends the connection; the rest goes nowhere."""
    left = after_bytes
    over = False

    async def cut(message: dict[str, Any]) -> None:
        nonlocal left, over
        if over:
            return
        if message["type"] == "http.response.start":
            await send(message)
            return
        data, left = message.get("body", b"")[:left], max(0, left - len(message.get("body", b"")))
        over = left == 0 or not message.get("more_body")
        await send({"type": "http.response.body", "body": data, "more_body": True})
        if over:
            await hang_up(scope)

    return cut


async def _refuse(scope: Scope, send: Send, error: WireError) -> None:
    if "websocket.http.response" in scope.get("extensions", {}):
        headers = [(b"content-type", b"application/json"), (b"x-amzn-errortype", error.code.encode())]
        with contextlib.suppress(RuntimeError):  # uvicorn's, where the handshake was answered already
            await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": error.body()})
    else:
        await send({"type": "websocket.close", "code": 1008})
