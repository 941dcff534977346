"""Parses request bodies, and turns errors into AWS's."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request

from ..._parsing import parse_json
from ..wire import WireError, invalid

AWS_REQUEST_ID = b"x-amzn-requestid"  # every AWS client reads it there
log = logging.getLogger(__name__)


def json_of(request: Request) -> Any:
    """Decode the request's JSON. An empty body is None. Raises: WireError 400."""
    body: bytes = request.scope["runtime.body"]
    try:
        return parse_json(body) if body else None
    except ValueError as e:
        raise invalid(f"The body is not JSON: {e}", reason="CannotParse") from None


def object_of(request: Request) -> dict[str, Any]:
    """Decode the request's JSON object. An empty body is an empty object. Raises: WireError 400."""
    body: dict[str, Any] | None = json_of(request)
    return body or {}


def as_wire_error(error: BaseException) -> WireError:
    """Return the error in AWS's words. An unforeseen error becomes InternalServerException and goes to the log."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return WireError("InternalServerException", "The runtime is shutting down.")
    log.error("a request failed with an unexpected error", exc_info=error)
    detail = f"{type(error).__name__}: {error}"
    return WireError("InternalServerException", "An internal error occurred.", localDetail=detail)
