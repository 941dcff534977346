"""HTTP/1.1 as the gateway speaks it to agents:

requests it has read, bytes of the replies it writes, errors in each dialect's own shape.
"""

from __future__ import annotations

import http

from .dialects.errors import RequestError, error_body

_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_LINES = {code: b"HTTP/1.1 %d %b\r\n" % (code, reason) for code, reason in _REASONS.items()}

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = b"application/json"

# Of an upstream's reply head only these reach the agent; the rest is about the connection it came by, or nobody's
# business.
PASSED_HEADERS = frozenset(
    {b"content-type", b"x-request-id", b"retry-after", b"retry-after-ms", b"openai-processing-ms", b"cache-control"}
)


class Request:
    """One whole request of an agent or a trainer."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query")

    def __init__(
        self, method: bytes, path: bytes, query: bytes, headers: dict[bytes, bytes], body: bytes, keep_alive: bool
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive

    def key(self) -> bytes:
        """The credential: `Authorization: Bearer`, or Anthropic's `x-api-key`."""
        authorization = self.headers.get(b"authorization")
        if authorization is not None:
            return authorization[7:] if authorization[:7].lower() == b"bearer " else authorization
        return self.headers.get(b"x-api-key", b"")


def status_line(status: int) -> bytes:
    return _LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status


def reply(
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: tuple[tuple[bytes, bytes], ...] | list[tuple[bytes, bytes]] = (),
    keep_alive: bool = True,
) -> bytes:
    """A whole response with its length."""
    head = [status_line(status), b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))]
    head.extend(b"%b: %b\r\n" % pair for pair in headers)
    head.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    head.append(body)
    return b"".join(head)


def stream_head(
    status: int, headers: list[tuple[bytes, bytes]] | tuple[tuple[bytes, bytes], ...], *, keep_alive: bool = True
) -> bytes:
    """The head of a chunked response."""
    lines = [status_line(status), b"transfer-encoding: chunked\r\n"]
    lines.extend(b"%b: %b\r\n" % pair for pair in headers)
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines)


def passed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0] in PASSED_HEADERS]


def error_reply(
    dialect: str, error: RequestError, *, headers: tuple[tuple[bytes, bytes], ...] = (), keep_alive: bool = True
) -> bytes:
    """An error in the shape that the dialect's clients read."""
    if error.kind in _FINAL:
        headers = (*headers, (b"x-should-retry", b"false"))  # OpenAI's and Anthropic's clients honour it
    body = error_body(dialect, error)
    return reply(error.status or 500, body, headers=headers, keep_alive=keep_alive)


_FINAL = frozenset({"turn_limit", "permission"})
