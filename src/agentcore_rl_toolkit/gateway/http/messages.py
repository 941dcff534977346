"""HTTP/1.1 towards agents: requests, the bytes of replies, and errors in each dialect's own shape."""

from __future__ import annotations

import fcntl
import hmac
import http
import os
import socket
import sys
import termios
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ...messages.errors import NOT_JSON, RequestError, error_body

_REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_LINES = {code: b"HTTP/1.1 %d %b\r\n" % (code, reason) for code, reason in _REASONS.items()}

JOINED_BYTES = 32 * 2**10  # up to here one buffer costs less than two
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = b"application/json"

# The headers of an upstream's reply that reach the agent. The others are about the upstream's connection.
PASSED_HEADERS = frozenset(
    {b"content-type", b"x-request-id", b"retry-after", b"retry-after-ms", b"openai-processing-ms", b"cache-control"}
)


_T = TypeVar("_T")


@dataclass(slots=True)
class Request:
    """One whole request of an agent or a trainer."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool

    def key(self) -> bytes:
        """The credential: `Authorization: Bearer`, or Anthropic's `x-api-key`."""
        authorization = self.headers.get(b"authorization")
        if authorization is not None:
            return authorization[7:] if authorization[:7].lower() == b"bearer " else authorization
        return self.headers.get(b"x-api-key", b"")

    def shows(self, key: bytes) -> bool:
        """Whether one of its credentials is this key: Anthropic's client sends both when its environment has another's."""
        if hmac.compare_digest(self.key(), key):
            return True
        return hmac.compare_digest(self.headers.get(b"x-api-key", b""), key)


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
    return reply_head(status, len(body), content_type=content_type, headers=headers, keep_alive=keep_alive) + body


def reply_head(
    status: int,
    size: int,
    *,
    content_type: bytes = JSON,
    headers: tuple[tuple[bytes, bytes], ...] | list[tuple[bytes, bytes]] = (),
    keep_alive: bool = True,
) -> bytes:
    """The head of a body of `size` bytes."""
    head = [status_line(status), b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, size)]
    head.extend(b"%b: %b\r\n" % pair for pair in headers)
    head.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(head)


def stream_head(
    status: int, headers: list[tuple[bytes, bytes]] | tuple[tuple[bytes, bytes], ...], *, keep_alive: bool = True
) -> bytes:
    """The head of a chunked response."""
    lines = [status_line(status), b"transfer-encoding: chunked\r\n"]
    lines.extend(b"%b: %b\r\n" % pair for pair in headers)
    lines.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(lines)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; nothing for nothing, as an empty one would be the last."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


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


def retry_after(error: RequestError) -> tuple[tuple[bytes, bytes], ...]:
    """The header for errors that may be over soon."""
    return ((b"retry-after", b"1"),) if error.kind in _PASSING or error.status == 503 else ()


_PASSING = frozenset({"overloaded", "upstream", "rate_limit"})
_FINAL = frozenset({"turn_limit", "permission"})


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """The JSON body of an administrative request. Raises: RequestError."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except NOT_JSON as e:
        raise RequestError(f"the request body does not fit: {e}") from e


def unconfirmed(transport: Any) -> int:
    """How many written bytes the peer's system has not confirmed; 0 where ours does not tell."""
    waiting: int = transport.get_write_buffer_size()
    try:
        counted = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (AttributeError, OSError, ValueError):
        return waiting
    return waiting + int.from_bytes(counted, sys.byteorder)


def unread(transport: Any) -> int:
    """How many bytes of the peer's lie with our system."""
    try:
        counted = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    except (AttributeError, OSError, ValueError):
        return 0
    return int.from_bytes(counted, sys.byteorder)


def hung_up(transport: Any) -> bool:
    """Whether the peer closed its side, also when the event loop has not reported it yet."""
    if transport.is_closing():
        return True
    try:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as peer:
            return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
