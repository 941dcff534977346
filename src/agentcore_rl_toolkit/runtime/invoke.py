"""Relay an invocation to its session and the reply back, byte for byte, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from .connection import send_whole
from .session import Session
from .sessions import SessionTable
from .upstream import Connection, UpstreamLostError, header
from .wire import (
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    Headers,
    WireError,
    forwarded_headers,
    returned_headers,
    trace_headers,
)

WHOLE_BYTES = 64 * 1024  # of a reply that says its length and is no larger, nothing is sent before it is complete

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def relay(
    table: SessionTable,
    session: Session,
    send: Send,
    *,
    method: bytes = b"POST",
    path: bytes = b"/invocations",
    headers: Headers,
    body: Sequence[bytes],
    request_id: str,
    scope: Mapping[str, Any] | None = None,
) -> None:
    """Send a request to an acquired session and stream its reply to ``send``. The session is released when the agent is done.

    A caller that goes away changes nothing for the agent: its reply is read to the end all the same, as on AWS.
    Raises: WireError 424 when the agent answers 4xx or 5xx, breaks off before its reply starts, or takes too long.
    """
    config = table.config
    connection: Connection | None = None
    started = False
    try:
        async with asyncio.timeout(config.invoke_timeout_s) as limit:
            connection = await session.connection()
            sent = forwarded_headers(headers, session.agent.header_allowlist)
            sent.append((SESSION_HEADER, session.id.encode()))
            sent.append((REQUEST_ID_HEADER, request_id.encode()))
            await connection.send(method, path, sent, body)
            status = await connection.head()
            if status >= 400:
                await connection.read()
                raise WireError(
                    "RuntimeClientError",
                    f"Received error ({status}) from runtime. Please check your CloudWatch logs for more information.",
                    localLog=str(session.log_path),
                )
            reply = returned_headers(connection.headers)
            reply += trace_headers(headers, reply)
            reply.append((SESSION_HEADER, session.id.encode()))
            content_type = header(connection.headers, b"content-type") or b""
            if content_type.startswith(b"text/event-stream"):
                limit.reschedule(asyncio.get_running_loop().time() + config.stream_timeout_s)
            length = header(connection.headers, b"content-length")
            if length is not None and length.isdigit() and int(length) <= WHOLE_BYTES:
                await connection.whole()  # servers send head and body apart; two writes would wake the caller twice
            started = True
            if connection.complete:
                data = connection.take()
                reply.append((b"content-length", b"%d" % len(data)))
                await send_whole(scope or {}, send, 200, reply, data)
                return
            if length is not None:
                reply.append((b"content-length", length))
            await send({"type": "http.response.start", "status": 200, "headers": reply})
            async for data in connection.body():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
    except UpstreamLostError as e:
        if started:
            raise
        raise WireError(
            "RuntimeClientError",
            f"The runtime ended the connection: {await session.cause() or e}",
            localLog=str(session.log_path),
        ) from e
    except TimeoutError as e:
        if started:
            raise UpstreamLostError("the reply took longer than the runtime allows") from e
        raise WireError(
            "RuntimeClientError", f"The runtime did not answer within {config.invoke_timeout_s:g} s."
        ) from e
    finally:
        if connection is not None:
            session.give_back(connection)
        table.release(session)
