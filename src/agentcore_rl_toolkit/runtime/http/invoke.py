"""Relay an invocation to its session and the reply back, byte for byte, as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sessions.connection import Connection, UpstreamLostError, header
from ..sessions.session import Session
from ..sessions.table import SessionTable
from ..wire import (
    MAX_CHUNK_BYTES,
    MAX_PAYLOAD_BYTES,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    Headers,
    WireError,
    forwarded_headers,
    returned_headers,
    trace_headers,
)
from .protocol import Send, send_whole

log = logging.getLogger(__name__)
ERROR_BYTES = 2**20  # of an agent's error, and `ERROR_S` seconds for them; nobody sees its text
ERROR_S = 5.0
WHOLE_BYTES = 64 * 1024  # of a reply that says its length and is no larger, nothing is sent before it is complete

Work = Callable[[Any, Send], Awaitable[None]]  # on a scope

INVOKE = "InvokeAgentRuntime"
AWS_REQUEST_ID = b"x-amzn-requestid"  # where every AWS client looks for it
_SERVER_ID = str(uuid.uuid4())[:23]
_requests = itertools.count(1)


def new_request_id() -> str:
    """In the form of a UUID, unique, and much cheaper than one."""
    return f"{_SERVER_ID}-{next(_requests):012x}"


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The id a request came with, or a new one."""
    given = headers.get(REQUEST_ID_HEADER)
    return given.decode("latin-1") if given is not None else new_request_id()


@dataclass(frozen=True)
class Asked:
    """A request that was sent to the session. Units: ``deadline_s`` on the loop's clock."""

    connection: Connection
    deadline_s: float


def request_headers(session: Session, headers: Headers, request_id: str) -> Headers:
    """What the agent gets to see of a request's headers, and what the platform adds."""
    sent = forwarded_headers(headers, session.agent.header_allowlist)
    sent.append((SESSION_HEADER, session.id.encode()))
    sent.append((REQUEST_ID_HEADER, request_id.encode()))
    return sent


def reply_headers(session: Session, request: Headers, answered: Headers, request_id: str) -> Headers:
    """What the caller gets to see of the agent's headers, and what the platform adds. The length is not among them."""
    reply = returned_headers(answered)
    reply += trace_headers(request, reply)
    reply.append((SESSION_HEADER, session.id.encode()))
    reply.append((AWS_REQUEST_ID, request_id.encode()))
    return reply


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
    asked: Asked | None = None,
) -> None:
    """Send a request to an acquired session and stream its reply to ``send``. The session is released when the agent is done.

    A caller that goes away changes nothing for the agent: its reply is read to the end all the same, as on AWS. ``asked``: the
    request is on its way already, only the reply is wanted.
    Raises: WireError 424 when the agent answers 4xx or 5xx, breaks off before its reply starts, or takes too long.
    UpstreamLostError when the reply had started and its rest will not come: the agent broke off, or exceeds AWS's sizes.
    """
    config = table.config
    connection = None if asked is None else asked.connection
    deadline_s = (
        asyncio.get_running_loop().time() + config.times.invoke_timeout_s if asked is None else asked.deadline_s
    )
    started = False
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            if connection is None:
                connection = await session.connection()
                await connection.send(method, path, request_headers(session, headers, request_id), body)
            status = await connection.head()
            if status >= 400:
                with contextlib.suppress(TimeoutError, UpstreamLostError):  # the status is all that the caller gets
                    async with asyncio.timeout(ERROR_S):
                        await connection.pass_over(ERROR_BYTES)
                raise WireError(
                    "RuntimeClientError",
                    f"Received error ({status}) from runtime. Please check your CloudWatch logs for more information.",
                    localLog=str(session.log_path),
                )
            reply = reply_headers(session, headers, connection.headers, request_id)
            content_type = header(connection.headers, b"content-type") or b""
            if content_type.startswith(b"text/event-stream"):
                limit.reschedule(asyncio.get_running_loop().time() + config.times.stream_timeout_s)
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
                _check_size(connection, session)
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
            "RuntimeClientError", f"The runtime did not answer within {config.times.invoke_timeout_s:g} s."
        ) from e
    finally:
        if connection is not None:
            session.give_back(connection)
        table.release(session)


def _check_size(connection: Connection, session: Session) -> None:
    """AWS's quotas for what an agent answers. Nothing but its end can tell the caller: its status was sent long ago.

    Raises: UpstreamLostError; the runtime's log says which quota.
    """
    if connection.chunk_bytes > MAX_CHUNK_BYTES:
        why = f"a chunk of its stream has more than {MAX_CHUNK_BYTES} bytes"
    elif connection.body_bytes > MAX_PAYLOAD_BYTES:
        why = f"it has more than {MAX_PAYLOAD_BYTES} bytes"
    else:
        return
    log.warning("the reply of session %s is cut off: %s", session.id, why)
    raise UpstreamLostError(f"the reply is cut off: {why}")
