"""The runtime's HTTP face: a plain ASGI application that maps AWS's paths to sessions and the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ..._servers import sigv4
from ..._servers.host_check import HostCheck
from ..api import control
from ..api.faults import Effects
from ..config import TimeLimits
from ..runtime import Runtime
from ..sessions.connection import UpstreamLostError, header
from ..sessions.session import Key, Session
from ..wire import (
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    Headers,
    Route,
    WireError,
    forwarded_headers,
    invalid,
    not_found,
    returned_headers,
    session_id_of,
    split_path,
)
from . import local_api
from .commands import parse_command, run_command
from .responses import (
    AWS_REQUEST_ID,
    Receive,
    Send,
    failed,
    read_body,
    refusal_error,
    reply_json,
    request_id_of,
)

Scope = dict[str, Any]
INVOKE, COMMAND, STOP = "InvokeAgentRuntime", "InvokeAgentRuntimeCommand", "StopRuntimeSession"
OPERATIONS = {
    ("POST", "invocations"): INVOKE,
    ("POST", "commands"): COMMAND,
    ("POST", "stopruntimesession"): STOP,
}


async def relay(
    session: Session, send: Send, *, times: TimeLimits, headers: Headers, body: Sequence[bytes], request_id: str
) -> None:
    """Send a request to an acquired session and stream its reply to ``send``.

    A caller that goes away changes nothing for the agent: its reply is read to the end all the same, as on AWS.
    Raises: WireError 424 when the agent answers 4xx or 5xx, breaks off before its reply starts, or takes too long.
    UpstreamLostError when the reply had started and its rest will not come: the agent broke off.
    """
    sent = forwarded_headers(headers, session.agent.header_allowlist)
    sent += [(SESSION_HEADER, session.id.encode()), (REQUEST_ID_HEADER, request_id.encode())]
    started = False
    try:
        async with contextlib.AsyncExitStack() as exits, asyncio.timeout(times.invoke_timeout_s) as limit:
            reply = await exits.enter_async_context(session.request(b"POST", session.agent.invocation_path, sent, body))
            if reply.status >= 400:
                raise WireError(
                    "RuntimeClientError",
                    f"Received error ({reply.status}) from runtime. "
                    "Please check your CloudWatch logs for more information.",
                    localLog=str(session.log_path),
                )
            if (header(reply.headers, b"content-type") or b"").startswith(b"text/event-stream"):
                limit.reschedule(asyncio.get_running_loop().time() + times.stream_timeout_s)
            data = await reply.read()  # an agent that ends before it is an error with a status
            started = True
            back = returned_headers(reply.headers)
            back += [(SESSION_HEADER, session.id.encode()), (AWS_REQUEST_ID, request_id.encode())]
            length = header(reply.headers, b"content-length") if data else b"0"
            if length is not None:
                back.append((b"content-length", length))
            await send({"type": "http.response.start", "status": 200, "headers": back})
            while data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await reply.read()
            await send({"type": "http.response.body", "body": b""})
    except UpstreamLostError as e:
        if started:
            raise
        why = await session.process.cause() or e
        raise WireError(
            "RuntimeClientError", f"The runtime ended the connection: {why}", localLog=str(session.log_path)
        ) from e
    except TimeoutError as e:
        if started:
            raise UpstreamLostError("the reply took longer than the runtime allows") from e
        raise WireError("RuntimeClientError", f"The runtime did not answer within {times.invoke_timeout_s:g} s.") from e


async def _nowhere(message: dict[str, Any]) -> None:
    return None


class RuntimeApp:
    """ASGI application over a `Runtime`. ``hosts``: the check of Host and Origin; None: none."""

    def __init__(self, runtime: Runtime, hosts: HostCheck | None = None) -> None:
        self.runtime = runtime
        self._hosts = hosts

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
        operation, status = "Unknown", 200
        try:
            self._check_host(scope["headers"])
            operation, work = self._work_of(scope, pieces, query)
            body = await self._body(scope, receive)
            status = await work(body, send)
        except (Exception, asyncio.CancelledError) as e:
            status = await failed(e, send)
        finally:
            self.runtime.metrics.request(operation, status)

    def _check_host(self, headers: Headers) -> None:
        refusal = self._hosts.refusal_of(headers) if self._hosts is not None else None
        if refusal is not None:
            raise refusal_error(refusal)

    def _work_of(
        self, scope: Scope, pieces: tuple[str, ...], query: Mapping[str, str]
    ) -> tuple[str, Callable[[list[bytes], Send], Coroutine[Any, Any, int]]]:
        """The operation a path names, and what answers it. Raises: WireError 404."""
        method: str = scope["method"]
        if pieces[0] == "_local":

            async def local(body: list[bytes], send: Send) -> int:
                await local_api.answer(self.runtime, method, pieces[1:], query, b"".join(body), send)
                return 200

            return "Local", local
        operation = OPERATIONS.get((method, "/".join(pieces[2:]))) if pieces[0] == "runtimes" else None
        if operation is not None:
            route = Route(operation, pieces[1], query)
            return operation, lambda body, send: self._data_plane(route, scope["headers"], body, send)
        managed = control.match(method, pieces)
        if managed is None:
            raise not_found(f"Operation {method} {scope['path']}")
        return managed[0], lambda body, send: self._control(managed, query, body, send)

    async def _body(self, scope: Scope, receive: Receive) -> list[bytes]:
        """The body of a request whose signature holds. Raises: WireError 403, 400."""
        credentials, headers = self.runtime.config.credentials, scope["headers"]
        body = await read_body(dict(headers), receive)
        if credentials and not sigv4.has_password(credentials, header(headers, b"authorization")):
            refusal = sigv4.refusal(
                credentials,
                method=scope["method"],
                path=scope["raw_path"].partition(b"?")[0].decode("latin-1"),
                query=scope["query_string"].decode("latin-1"),
                headers=headers,
                body=b"".join(body),
                now=time.time(),
            )
            if refusal is not None:
                raise WireError("AccessDeniedException", refusal)
        return body

    async def _control(
        self, managed: tuple[str, str, str], query: Mapping[str, str], body: list[bytes], send: Send
    ) -> int:
        operation, runtime, endpoint = managed
        call = control.Call(operation, runtime, endpoint, query, control.parse_body(b"".join(body)))
        status, content = await self.runtime.control.call(call)
        await reply_json(send, content, status)
        return status

    # -- the data plane
    async def _data_plane(self, route: Route, headers: Headers, body: list[bytes], send: Send) -> int:
        by_name = dict(headers)
        session_id = session_id_of(by_name)
        agent = await self.runtime.find(route)
        self.runtime.quotas.request(route.operation, agent.runtime_id, time.monotonic())
        key = (agent.runtime_id, route.qualifier, session_id or str(uuid.uuid4()))
        if route.operation == STOP and session_id is None:
            raise invalid("runtimeSessionId is required", field="runtimeSessionId")
        effects = self._effects(route.operation, agent.name, key)
        if effects.drop == "before":
            raise ConnectionResetError("a planned fault")
        reply_to = send if effects.drop is None else _nowhere
        if self.runtime.cluster is not None:
            await self.runtime.cluster.forward(route, agent, key, headers, body, reply_to)
        elif route.operation == STOP:
            control.parse_body(b"".join(body))
            await self._stop(key, reply_to)
        else:
            await self._with_session(route.operation, agent, key, effects, headers, body, reply_to)
        if effects.drop == "after":
            raise ConnectionResetError("a planned fault")
        return 200

    def _effects(self, operation: str, agent: str, key: Key) -> Effects:
        return Effects(self.runtime.faults.draw(operation, agent, starts=key not in self.runtime.table.sessions))

    async def _stop(self, key: Key, send: Send) -> None:
        if self.runtime.table.stop(key) is None:
            raise not_found(f"Session {key[2]}")
        await reply_json(send, {}, headers=[(SESSION_HEADER, key[2].encode())])

    async def _with_session(
        self, operation: str, agent: Any, key: Key, effects: Effects, headers: Headers, body: list[bytes], send: Send
    ) -> None:
        command = parse_command(b"".join(body)) if operation == COMMAND else None
        if operation == INVOKE:
            self.runtime.check_store(body)
        request_id = request_id_of(dict(headers))
        table = self.runtime.table
        async with table.in_use(agent, key, start_delay_s=effects.start_delay_s) as session:
            for delay_s in effects.kills_s:
                asyncio.get_running_loop().call_later(delay_s, session.process.stop, 0.0)
            if command is not None:
                await run_command(session, *command, send, request_id)
                return
            times = self.runtime.config.times
            await relay(session, send, times=times, headers=headers, body=body, request_id=request_id)
