"""Reads requests, and writes whole responses and errors, on plain ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Send

from ..._parsing import parse_json
from ..._servers.host_check import Refusal
from ..._servers.process import break_off
from ..sessions.connection import UpstreamLostError
from ..wire import MAX_PAYLOAD_BYTES, REQUEST_ID_HEADER, WireError, invalid

BROKEN_OFF = 499  # the status that metrics count where the caller was gone, or got no whole response
AWS_REQUEST_ID = b"x-amzn-requestid"  # where every AWS client looks for it
log = logging.getLogger(__name__)


def query_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """The first value of each query parameter."""
    found = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return {name: values[0] for name, values in found.items()}


def parse_object(data: bytes) -> dict[str, Any]:
    """The request's JSON object; nothing is an empty one. Raises: WireError 400."""
    try:
        body = parse_json(data) if data else {}
    except ValueError as e:
        raise invalid(f"The body is not JSON: {e}", reason="CannotParse") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object", reason="CannotParse")
    return body


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The id a request came with, or a new one."""
    given = headers.get(REQUEST_ID_HEADER)
    return given.decode("latin-1") if given is not None else str(uuid.uuid4())


async def read_body(headers: Mapping[bytes, bytes], receive: Receive) -> list[bytes]:
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
    """Send a complete response."""
    own = [
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        (AWS_REQUEST_ID, request_id_of({}).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def reply_json(send: Send, content: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await reply(send, status, json.dumps(content).encode() if status != 204 else b"", headers)


async def failed(error: BaseException, send: Send) -> int:
    """Answer with an error. Where the response had begun, or the caller is gone, end the connection, so that no part of a
    response is taken for the whole. Returns the status."""
    if isinstance(error, (ConnectionResetError, UpstreamLostError)):
        await break_off(send)
        return BROKEN_OFF
    known = as_wire_error(error)
    try:
        await reply(send, known.status, known.body(), [(b"x-amzn-errortype", known.code.encode())])
    except RuntimeError:  # uvicorn's: the response had begun
        await break_off(send)
    return known.status


def as_wire_error(error: BaseException) -> WireError:
    """The error as AWS words it. Anything unforeseen is its InternalServerException, and goes to the log."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return WireError("InternalServerException", "The runtime is shutting down.")
    log.error("a request failed for an unforeseen reason", exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    return WireError("InternalServerException", "An internal error occurred.", localDetail=detail)


def refusal_error(refusal: Refusal) -> WireError:
    """A refused Host or Origin, as AWS's clients read errors."""
    return WireError("AccessDeniedException", refusal.message, status=refusal.status)
