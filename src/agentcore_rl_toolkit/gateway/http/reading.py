"""Reading requests from a client's connection."""

from __future__ import annotations

import time
from typing import Protocol

import httptools

from ..._servers.host_check import HostCheck
from ...messages.errors import RequestError
from ..config import Limits
from .messages import Request

SMALL_BODY = 64 * 2**10  # a larger request must show a key first


class Receiver(Protocol):
    """The connection that the requests are read for."""

    def admit(self, request: Request) -> None:
        """Check who sends a request before its body is read, so that strangers cannot send much. Raises: RequestError."""
        ...

    def expects(self) -> None:
        """The client waits for "100 Continue"."""
        ...

    def receive(self, request: Request) -> None:
        """A request is whole."""
        ...

    def refuse(self, message: str, *, kind: str = "invalid_request", status: int | None = None) -> None:
        """The request cannot be served, and it is not known where the next one begins."""
        ...


class RequestReader:
    """Parses one connection's bytes into requests.

    ``between``: no request has begun. ``begun_s``: when the last one began; ``head_since``: the same, while its head is
    incomplete. ``refused``: nothing more is read.
    """

    def __init__(self, receiver: Receiver, limits: Limits, hosts: HostCheck) -> None:
        self._receiver = receiver
        self._limits = limits
        self._hosts = hosts
        self._parser = httptools.HttpRequestParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._size = 0
        self._silent = 0  # bytes since the parser last found something
        self.between = True
        self.begun_s = 0.0
        self.head_since: float | None = None
        self.refused = False
        self.url = b""

    def feed(self, data: bytes) -> None:
        """Bytes of the client's have come."""
        if self.refused:
            return
        self._silent += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._stay(data[e.args[0] :])
        except httptools.HttpParserError as e:
            self._refuse(f"the request is not valid HTTP: {e}")
        if self._silent > self._limits.header_bytes:
            self._refuse_head()

    def _stay(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 with a client that offered another protocol (Java's client offers h2c): RFC 9110, 7.8."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse("this server is no proxy", kind="method_not_allowed")
        if self.refused:
            return
        self._parser = httptools.HttpRequestParser(self)
        head = [b"%b %b HTTP/1.1" % (method, self.url)]
        head += [b"%b: %b" % pair for pair in self._headers.items() if pair[0] not in (b"upgrade", b"connection")]
        self.feed(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        self.between = False
        self.begun_s = self.head_since = time.monotonic()
        self.url = b""
        self._headers = {}
        self._head_bytes = 0
        self._body = []
        self._size = self._silent = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        limits = self._limits
        headers = self._headers
        self.head_since = None
        if self._head_bytes > limits.header_bytes:
            self._refuse_head()
            return
        hosts = self._hosts
        if headers.get(b"host") not in hosts.known or b"origin" in headers:
            refusal = hosts.refusal(headers.get(b"host"), headers.get(b"origin"))
            if refusal is not None:
                self._refuse(refusal.message, kind="permission", status=refusal.status)
                return
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > limits.body_bytes):
            self._refuse_body()
            return
        if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            self._refuse("send the request body as it is: this server takes no content-encoding", status=415)
            return
        if b"transfer-encoding" in headers or (length is not None and int(length) > SMALL_BODY):
            path = self.url.partition(b"?")[0]
            try:
                self._receiver.admit(Request(self._parser.get_method(), path, b"", headers, b"", False))
            except RequestError as e:
                self._refuse(e.message, kind=e.kind)
                return
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self._receiver.expects()

    def on_body(self, body: bytes) -> None:
        if self.refused:
            return
        self._body.append(body)
        self._silent = 0
        self._size += len(body)
        if self._size > self._limits.body_bytes:
            self._refuse_body()

    def on_message_complete(self) -> None:
        parser = self._parser
        self.between = True
        self._silent = 0
        if parser.should_upgrade() or self.refused:
            return
        body = self._body
        path, _, query = self.url.partition(b"?")
        whole = body[0] if len(body) == 1 else b"".join(body)
        request = Request(parser.get_method(), path, query, self._headers, whole, parser.should_keep_alive())
        self._body = []
        self._receiver.receive(request)

    def _refuse_head(self) -> None:
        self._refuse(f"the request head is larger than {self._limits.header_bytes} bytes", kind="too_large", status=431)

    def _refuse_body(self) -> None:
        self._refuse(f"the request body is larger than {self._limits.body_bytes} bytes", kind="too_large")

    def http10(self) -> bool:
        """Whether the client speaks HTTP/1.0, which knows no chunks."""
        return bool(self._parser.get_http_version() == "1.0")

    def _refuse(self, message: str, *, kind: str = "invalid_request", status: int | None = None) -> None:
        if not self.refused:
            self.stop()
            self._receiver.refuse(message, kind=kind, status=status)

    def stop(self) -> None:
        """Read no further request."""
        self.refused = True
        self.head_since = None
        self._body.clear()
