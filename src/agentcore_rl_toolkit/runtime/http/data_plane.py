"""The data plane: invoke a session, run a command beside it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Scope, Send

from ..agents.agent import Agent
from ..api.faults import Effects
from ..config import TimeLimits
from ..runtime import Runtime
from ..sessions.connection import UpstreamLostError, header
from ..sessions.session import Key, Session
from ..wire import (
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    Headers,
    Target,
    WireError,
    forwarded_headers,
    invalid,
    not_found,
    returned_headers,
    session_id_of,
)
from .commands import parse_command, run_command
from .responses import AWS_REQUEST_ID, parse_object, query_of, reply_json, request_id_of

INVOKE, COMMAND, STOP = "InvokeAgentRuntime", "InvokeAgentRuntimeCommand", "StopRuntimeSession"


class DataPlane:
    """Serves the operations on the sessions of a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def endpoint(self, operation: str) -> Callable[[Scope, Send], Awaitable[None]]:
        async def respond(scope: Scope, send: Send) -> None:
            await self.call(operation, Target(scope["path_params"]["runtime"], query_of(scope)), scope, send)

        return respond

    async def call(self, operation: str, target: Target, scope: Scope, send: Send) -> None:
        """Check the request, draw its faults, and obey it. Raises: WireError."""
        runtime, headers, body = self.runtime, scope["headers"], scope["runtime.body"]
        session_id = session_id_of(dict(headers))
        agent = await runtime.find(target)
        runtime.quotas.request(operation, agent.runtime_id, time.monotonic())
        if operation == STOP and session_id is None:
            raise invalid("runtimeSessionId is required", field="runtimeSessionId")
        key = (agent.runtime_id, target.qualifier, session_id or str(uuid.uuid4()))
        effects = Effects(runtime.faults.draw(operation, agent.name, starts=key not in runtime.table.sessions))
        async with effects.dropping(send) as send_or_drop:
            if runtime.cluster is not None:
                await runtime.cluster.forward(operation, target, agent, key, headers, body, send_or_drop)
            elif operation == STOP:
                parse_object(b"".join(body))
                await self._stop(key, send_or_drop)
            else:
                await self._with_session(operation, agent, key, effects, headers, body, send_or_drop)

    async def _stop(self, key: Key, send: Send) -> None:
        if self.runtime.table.stop(key) is None:
            raise not_found(f"Session {key[2]}")
        await reply_json(send, {}, headers=[(SESSION_HEADER, key[2].encode())])

    async def _with_session(
        self, operation: str, agent: Agent, key: Key, effects: Effects, headers: Headers, body: list[bytes], send: Send
    ) -> None:
        command = parse_command(b"".join(body)) if operation == COMMAND else None
        if operation == INVOKE:
            self.runtime.check_store(body)
        request_id = request_id_of(dict(headers))
        async with self.runtime.table.in_use(agent, key, start_delay_s=effects.start_delay_s) as session:
            for delay_s in effects.kills_s:
                asyncio.get_running_loop().call_later(delay_s, session.process.stop, 0.0)
            if command is not None:
                await run_command(session, *command, send, request_id)
                return
            times = self.runtime.config.times
            await relay(session, send, times=times, headers=headers, body=body, request_id=request_id)


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
    log = str(session.log_path)
    started = False
    try:
        async with contextlib.AsyncExitStack() as exits, asyncio.timeout(times.invoke_timeout_s) as limit:
            reply = await exits.enter_async_context(session.request(b"POST", session.agent.invocation_path, sent, body))
            if reply.status >= 400:
                raise WireError(
                    "RuntimeClientError",
                    f"Received error ({reply.status}) from runtime. "
                    "Please check your CloudWatch logs for more information.",
                    localLog=log,
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
        raise WireError("RuntimeClientError", f"The runtime ended the connection: {why}", localLog=log) from e
    except TimeoutError as e:
        if started:
            raise UpstreamLostError("the reply took longer than the runtime allows") from e
        raise WireError("RuntimeClientError", f"The runtime did not answer within {times.invoke_timeout_s:g} s.") from e
