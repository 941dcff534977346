"""Relay a request to its session and the reply back, byte for byte, as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from ..config import TimeLimits
from ..sessions.connection import UpstreamLostError, header
from ..sessions.session import Session
from ..wire import (
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    Headers,
    WireError,
    forwarded_headers,
    returned_headers,
)
from .responses import AWS_REQUEST_ID, Send


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
