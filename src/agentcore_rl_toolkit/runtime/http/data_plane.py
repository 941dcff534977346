"""The data plane: invoke a session, run a command in it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..api import faults
from ..config import TimeLimits
from ..launcher.connection import UpstreamLostError, header, open_request
from ..runtime import Runtime
from ..sessions.session import Session
from ..wire import (
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    WireError,
    forwarded_headers,
    invalid,
    not_found,
    parse_target,
    returned_headers,
    session_id_of,
)
from .commands import parse_command, run_command
from .responses import object_of

INVOKE, COMMAND, STOP = "InvokeAgentRuntime", "InvokeAgentRuntimeCommand", "StopRuntimeSession"
OPERATIONS = {"invocations": INVOKE, "commands": COMMAND, "stopruntimesession": STOP}


def routes(runtime: Runtime) -> list[Route]:
    """Return the routes of the data plane."""
    return [
        Route(f"/runtimes/{{runtime:path}}/{path}", SessionOperation(runtime, name), methods=["POST"], name=name)
        for path, name in OPERATIONS.items()
    ]


class SessionOperation:
    """An operation on the sessions of a runtime, as an ASGI application: it writes its response piece by piece."""

    def __init__(self, runtime: Runtime, operation: str) -> None:
        self.runtime, self.operation = runtime, operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out the operation. Raises: WireError, ConnectionResetError, UpstreamLostError."""
        request, runtime, operation = Request(scope), self.runtime, self.operation
        target = parse_target(request.path_params["runtime"], request.query_params)
        session_id = session_id_of(scope["headers"])
        agent = await runtime.find(target)
        runtime.quotas.request(operation, agent.runtime_id, time.monotonic())
        if operation == STOP and session_id is None:
            raise invalid("runtimeSessionId is required", field="runtimeSessionId")
        key = (agent.runtime_id, target.endpoint, session_id or str(uuid.uuid4()))
        drawn = runtime.faults.draw(operation, agent.name, starts=key not in runtime.table.sessions)
        async with faults.injected(drawn, send) as send_or_drop:
            if operation == STOP:
                object_of(request)
                if runtime.table.stop(key) is None:
                    raise not_found(f"Session {key[2]}")
                await JSONResponse({}, headers={SESSION_HEADER.decode(): key[2]})(scope, receive, send_or_drop)
                return
            command = parse_command(request) if operation == COMMAND else None
            delay_s = sum(fault.delay_s for fault in drawn if fault.kind == "slow_start")
            async with runtime.table.open(agent, key, start_delay_s=delay_s).in_use() as session:
                assert session.process is not None
                for fault in drawn:
                    if fault.kind == "kill":
                        asyncio.get_running_loop().call_later(fault.delay_s, session.process.stop, 0.0)
                if command is not None:
                    await run_command(session, *command, send_or_drop)
                else:
                    await relay(session, scope, send_or_drop, times=runtime.config.times)


async def relay(session: Session, scope: Scope, send: Send, *, times: TimeLimits) -> None:
    """Send a request to an acquired session and stream its reply to ``send``.

    If the caller disconnects, the agent's reply is still read to its end, as on AWS.
    Raises: WireError 424 when the agent answers 4xx or 5xx, breaks off before its reply starts, or takes too long.
    UpstreamLostError when the agent ended its reply early.
    """
    sent = forwarded_headers(scope["headers"], session.agent.header_allowlist)
    sent += [(SESSION_HEADER, session.id.encode("latin-1")), (REQUEST_ID_HEADER, scope["runtime.request_id"])]
    assert session.process is not None
    log = str(session.place.log_path)
    started = False
    try:
        async with contextlib.AsyncExitStack() as exits, asyncio.timeout(times.invoke_timeout_s) as limit:
            body = scope["runtime.body"]
            reply = await exits.enter_async_context(
                open_request(session.process.dial, b"POST", b"/invocations", sent, body)
            )
            if reply.status >= 400:
                raise WireError(
                    "RuntimeClientError",
                    f"Received error ({reply.status}) from runtime. "
                    "Please check your CloudWatch logs for more information.",
                    localLog=log,
                )
            if (header(reply.headers, b"content-type") or b"").startswith(b"text/event-stream"):
                limit.reschedule(asyncio.get_running_loop().time() + times.stream_timeout_s)
            pieces = aiter(reply.aiter_stream())
            data = await anext(pieces, b"")  # an agent that ends before it is an error with a status
            started = True
            back = [*returned_headers(reply.headers), (SESSION_HEADER, session.id.encode("latin-1"))]
            length = header(reply.headers, b"content-length") if data else b"0"
            if length is not None:
                back.append((b"content-length", length))
            await send({"type": "http.response.start", "status": 200, "headers": back})
            while data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await anext(pieces, b"")
            await send({"type": "http.response.body", "body": b""})
    except UpstreamLostError as e:
        if started:
            raise
        why = await session.death() or e
        raise WireError("RuntimeClientError", f"The runtime ended the connection: {why}", localLog=log) from e
    except TimeoutError as e:
        if started:
            raise UpstreamLostError("the reply took longer than the runtime allows") from e
        raise WireError("RuntimeClientError", f"The runtime did not answer within {times.invoke_timeout_s:g} s.") from e
