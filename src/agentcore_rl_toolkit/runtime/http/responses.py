"""A request's body in, whole replies and errors out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..sessions.connection import UpstreamLostError
from ..wire import MAX_PAYLOAD_BYTES, WireError, invalid
from .invoke import AWS_REQUEST_ID, new_request_id
from .protocol import Receive, Send, break_off, late_body

BROKEN_OFF = 499  # the status that metrics count where the caller was gone, or got no whole reply
UNPROVEN_BYTES = 2**30
log = logging.getLogger(__name__)


class LateBodyError(WireError):
    """A body that does not come: its connection is of no more use. (One that is too large is read to its end, unkept, so that
    its sender sees the reply.)"""


class Receiving:
    """Bytes of bodies that are on their way in and whose senders are not proven yet, together."""

    def __init__(self, most_bytes: int = UNPROVEN_BYTES) -> None:
        self.left = most_bytes

    def take(self, count: int) -> None:
        """Raises: WireError 429 when there are too many."""
        self.left -= count
        if self.left < 0:
            raise WireError("ThrottlingException", "Too many large requests are on their way in; try again.")


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, pause_s: float, receiving: Receiving | None = None
) -> list[bytes]:
    """The request's body in the pieces it came in. Units: ``pause_s`` seconds, the longest wait for the next piece.

    ``receiving``: what counts it, where its sender is not proven.
    Raises: WireError 400 above 100 MB, or when the rest does not come; 429 when too much of others is on its way.
    """
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > MAX_PAYLOAD_BYTES:
        raise _too_large()
    pieces: list[bytes] = []
    size = counted = 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(pause_s) as limit:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionResetError("the caller went away while sending")
                piece = message.get("body", b"")
                if piece:
                    if receiving is not None:
                        counted += len(piece)
                        receiving.take(len(piece))
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_PAYLOAD_BYTES:
                        raise _too_large()
                if not message.get("more_body"):
                    return pieces
                limit.reschedule(loop.time() + pause_s)
    except TimeoutError:
        error = late_body(pause_s)
        raise LateBodyError(error.code, error.message, **error.extra) from None
    finally:
        if receiving is not None:
            receiving.left += counted


def _too_large() -> WireError:
    return invalid(f"payload exceeds {MAX_PAYLOAD_BYTES} bytes", field="payload")


async def reply(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), kind: bytes = b"application/json"
) -> None:
    """Send a complete reply."""
    own = [
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        (AWS_REQUEST_ID, new_request_id().encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


async def failed(error: BaseException, scope: Mapping[str, Any], send: Send) -> int:
    """Tell the caller; where the reply had begun, or the caller is gone, all that is left is to break the connection, so that
    nobody takes it for whole. Returns the status."""
    if isinstance(error, (ConnectionResetError, UpstreamLostError)):
        await break_off(scope)
        return BROKEN_OFF
    known = as_wire_error(error)
    headers = [(b"x-amzn-errortype", known.code.encode())]
    if isinstance(known, LateBodyError):
        headers.append((b"connection", b"close"))
    try:
        await reply(send, known.status, known.body(), headers)
    except RuntimeError:  # uvicorn's: the reply had begun
        await break_off(scope)
    return known.status


def as_wire_error(error: BaseException) -> WireError:
    """What AWS would say of it: anything unforeseen is its InternalServerException, and goes to the log."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return WireError("InternalServerException", "The runtime is shutting down.")
    log.error("a request failed for a reason that nobody foresaw", exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    return WireError("InternalServerException", "An internal error occurred.", localDetail=detail)
