"""Requests that are passed on to another server, with one connection for each request."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...errors import text_of
from ..relay import refusal
from .clients import trust

_TIMEOUTS = {"timeout": {"connect": 10.0}}  # seconds; a model may think for as long as it wants
# Of the connection, not of the message. Without `accept-encoding` replies are not compressed.
_NOT_PASSED = frozenset(
    b"connection keep-alive proxy-authenticate te trailer transfer-encoding upgrade host content-length accept-encoding".split()
)


async def forward(request: Request, url: str, headers: Sequence[tuple[bytes, bytes]], failure: str) -> Response:
    """Send a request to another server, and return its reply as it arrives. If the caller disconnects, the connection is closed.

    Any failure before the head of the reply is a 502 whose text begins with ``failure``. A later one breaks the caller's
    connection, too.
    """
    kept = [(k, v) for k, v in headers if k.lower() not in _NOT_PASSED]
    content = await request.body()
    # A transport and not a client, whose requests could be redirected. A connection is used once.
    transport = httpx.AsyncHTTPTransport(verify=trust(), limits=httpx.Limits(max_keepalive_connections=0))
    try:
        sent = httpx.Request(request.method, url, headers=kept, content=content, extensions=_TIMEOUTS)
        reply = await transport.handle_async_request(sent)
    except Exception as e:  # a port above 65,535 is an ExceptionGroup on asyncio's own loop
        return refusal(502, f"{failure}: {text_of(e) or type(e).__name__}")
    response = StreamingResponse(reply.aiter_raw(), reply.status_code)
    given = [(k.lower(), v) for k, v in reply.headers.raw]
    response.raw_headers = [(k, v) for k, v in given if k == b"content-length" or k not in _NOT_PASSED]
    return response
