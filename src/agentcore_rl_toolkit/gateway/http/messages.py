"""Requests of agents and trainers, and errors in the shape that each dialect's clients read."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from ...messages.errors import NOT_JSON, RequestError
from ...messages.wire import error_body

# The headers of an inference server's reply that reach the agent. The others are about the server's connection.
PASSED_HEADERS = (
    "content-type",
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "openai-processing-ms",
    "cache-control",
)
JSON = "application/json"

_PASSING = frozenset({"overloaded", "upstream", "rate_limit"})
_FINAL = frozenset({"turn_limit", "permission"})
_T = TypeVar("_T")


@dataclass(slots=True)
class Request:
    """One request of an agent or a trainer. ``path`` is as it was sent: ids contain ``/`` and ``%``."""

    method: bytes
    path: bytes
    query: bytes
    headers: Mapping[str, str]
    body: bytes = b""

    def _header(self, name: str) -> bytes:
        return self.headers.get(name, "").encode("utf-8", "surrogateescape")

    def shows(self, key: bytes) -> bool:
        """Return True if one of its credentials is this key. Anthropic's client sends two when its environment has another."""
        authorization, other = self._header("authorization"), self._header("x-api-key")
        bearer = authorization[7:] if authorization[:7].lower() == b"bearer " else authorization
        return hmac.compare_digest(bearer, key) or hmac.compare_digest(other, key)

    def shows_admin(self, key: bytes) -> bool:
        """Return True if it carries the administrator's key."""
        if "x-admin-key" in self.headers:
            return hmac.compare_digest(self._header("x-admin-key"), key)
        return self.shows(key)


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a server's reply that the agent gets."""
    return {name: headers[name] for name in PASSED_HEADERS if name in headers}


def error_response(dialect: str, error: RequestError, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the shape that the dialect's clients read. Without ``headers``, a passing error has a retry-after."""
    own = dict(retry_after(error) if headers is None else headers)
    if error.kind in _FINAL:
        own["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients honor it
    return web.Response(
        status=error.status or 500, body=error_body(dialect, error), content_type=JSON, headers=own or None
    )


def retry_after(error: RequestError) -> dict[str, str]:
    """The header for errors that may be over soon."""
    return {"retry-after": "1"} if error.kind in _PASSING or error.status == 503 else {}


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """The JSON body of an administrative request. Raises: RequestError."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except NOT_JSON as e:
        raise RequestError(f"the request body does not fit: {e}") from e
