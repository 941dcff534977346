"""The side of a connection that faces an agent (or a trainer): reads requests, hands them on one at a time, writes replies."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Iterator
from typing import Any, Protocol

import httptools

from ..._servers.host_check import HostCheck
from ..._servers.open_files import MAX_OPEN_FILES
from ...messages.errors import RequestError
from ..config import Limits
from .messages import CONTINUE, Request, error_reply, reply, retry_after, unconfirmed

log = logging.getLogger(__name__)

SMALL_BODY = 64 * 2**10  # a larger request must show a key first
STALLED_S = 60.0  # an agent that reads nothing of its reply for this long is gone
WRITE_HIGH = 256 * 2**10
LINGER_S = 2.0  # a client that is still sending when it is refused would lose the answer to a reset connection
RESET_S = 30.0  # systems on the way reset connections too, that were idle for a minute or more
SETTLED_S = 1.0  # a system may wait for 0.2 s before it confirms what it has got


class AgentCall(Protocol):
    """The model call that a client waits for."""

    def agent_gone(self) -> None: ...
    def agent_slow(self) -> None: ...
    def agent_ready(self) -> None: ...


class WrittenReply(Protocol):
    """A recorded reply that was written to a client."""

    def carried(self) -> None: ...

    def not_taken(self, *, sure: bool) -> None:
        """The connection ended too early. ``sure``: the client cannot have got the reply whole."""


class Handler(Protocol):
    """The handler of a connection's requests."""

    def admit(self, request: Request) -> None: ...
    def dispatch(self, conn: AgentConnection, request: Request) -> None: ...


class RequestReader:
    """Parses one connection's bytes into requests.

    ``between``: no request has begun. ``begun_s``: when the last one began; ``head_since``: the same, while its head is
    incomplete. ``refused``: nothing more is read.
    """

    def __init__(self, conn: AgentConnection, limits: Limits, hosts: HostCheck) -> None:
        self._conn = conn
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
        except httptools.HttpParserCallbackError:  # an error of the gateway, not of the client
            log.exception("a request to %s failed", self.url.decode("utf-8", "replace"))
            self._refuse("the gateway could not handle this request; see its log", kind="internal")
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
                self._conn.admit(Request(self._parser.get_method(), path, b"", headers, b"", False))
            except RequestError as e:
                self._refuse(e.message, kind=e.kind)
                return
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self._conn.expects()

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
        self._conn.receive(request)

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
            self._conn.refuse(message, kind=kind, status=status)

    def stop(self) -> None:
        """Read no further request."""
        self.refused = True
        self.head_since = None
        self._body.clear()


class AgentConnection(asyncio.Protocol):
    """One client connection. ``call`` is the model call it is waiting for, ``task`` the administrative request."""

    def __init__(self, connections: OpenConnections, handler: Handler) -> None:
        self._connections = connections
        self._handler = handler
        self.reader = RequestReader(self, connections.limits, connections.hosts)
        self._closing = False
        self._unconfirmed: int | None = None  # bytes that the client's system had not confirmed when it hung up
        # Replies that nothing shows to have been taken yet, and how many of the last bytes are of no use to the agent
        # (None: every byte is).
        self.carried: list[tuple[WrittenReply, int | None]] = []
        self.busy = False
        self.call: AgentCall | None = None
        self.task: asyncio.Task[None] | None = None
        self.transport: Any = None
        self.paused_since: float | None = None
        self.writable: asyncio.Future[None] | None = None
        self.last_s = time.monotonic()  # when the last reply was whole

    @property
    def active_s(self) -> float:
        """When the last request began, or the last reply was whole."""
        return max(self.last_s, self.reader.begun_s)

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=WRITE_HIGH)
        self._connections.adopt(self)

    def data_received(self, data: bytes) -> None:
        if self.carried and not self.busy:  # a client that sends the next request has read the last reply
            self.carried.clear()
        self.reader.feed(data)

    def eof_received(self) -> None:
        if self.carried:
            self._unconfirmed = unconfirmed(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        if self.carried:
            self._judge(exc)
        call, self.call = self.call, None
        if call is not None:
            call.agent_gone()
        if self.task is not None:
            self.task.cancel()
        if self.writable is not None and not self.writable.done():
            self.writable.set_exception(ConnectionResetError("the client went away"))

    def _judge(self, exc: Exception | None) -> None:
        """The connection ended: find out whether the replies that it carried last were taken (see `calls.dedup`)."""
        left = self._unconfirmed
        if left is None:
            # We closed it. What was written just now may be confirmed in a moment.
            settled = exc is not None or time.monotonic() - self.last_s > SETTLED_S
            left = unconfirmed(self.transport) if settled else 0
        soon = exc is not None and time.monotonic() - self.last_s < RESET_S
        carried, self.carried = self.carried, []
        for answer, spare in carried:
            sure = left > (spare or 0) or (soon and spare is None)
            if sure or exc is not None or left:
                answer.not_taken(sure=sure)

    def pause_writing(self) -> None:
        self.paused_since = time.monotonic()
        if self.call is not None:
            self.call.agent_slow()

    def resume_writing(self) -> None:
        self.paused_since = None
        if self.call is not None:
            self.call.agent_ready()
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)

    # -- from the reader

    def admit(self, request: Request) -> None:
        """Check who sends a request before its body is read, so that strangers cannot send much. Raises: RequestError."""
        self._handler.admit(request)

    def expects(self) -> None:
        """The client waits for "100 Continue"."""
        if not self.busy:
            self.transport.write(CONTINUE)

    def receive(self, request: Request) -> None:
        """A request is whole. One that was sent ahead of a reply gets none: the connection ends behind that (RFC 9112, 9.3.2)."""
        if self.busy:
            self.reader.stop()
            self._closing = True
            return
        self.busy = True
        if request.method != b"HEAD":
            try:
                self._handler.dispatch(self, request)
            except BaseException:
                self.busy = False  # the reader answers with an error
                raise
            return
        # The answer to a HEAD has no body, whatever its length says; only a probe of our health has a use for one.
        well = request.path in (b"/healthz", b"/health")
        self.write(reply(200 if well else 405, b"", headers=((b"allow", b"GET, POST"),), keep_alive=request.keep_alive))
        self.done(keep_alive=request.keep_alive)

    # -- towards the client

    def refuse(self, message: str, *, kind: str = "invalid_request", status: int | None = None) -> None:
        """Answer with an error and end the connection: where the next request begins is not known."""
        self.reader.stop()
        if self.busy:
            self._closing = True  # the reply that is being written must not get an error in its middle
            return
        dialect = "anthropic" if b"/v1/messages" in self.reader.url else "chat"
        error = RequestError(message, kind=kind, status=status)
        self.transport.write(error_reply(dialect, error, headers=retry_after(error), keep_alive=False))
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def carries(self, answer: WrittenReply, spare: int | None) -> None:
        """A recorded reply was written; ``spare`` of its last bytes are of no use to the agent, None: it is not streamed."""
        answer.carried()
        self.carried.append((answer, spare))

    async def drain(self) -> None:
        """Wait until the client has taken enough of what was written.

        Raises: ConnectionResetError when it went away.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the client went away")
        if self.paused_since is not None:
            self.writable = asyncio.get_running_loop().create_future()
            try:
                await self.writable
            finally:
                self.writable = None

    def done(self, *, keep_alive: bool = True) -> None:
        """The reply is written in full: go on with the next request."""
        self.call = None
        self.last_s = time.monotonic()
        if not keep_alive or self._closing:
            self._hang_up()
            return
        self.busy = False

    def _hang_up(self) -> None:
        """End the connection; behind a recorded reply after the client, which shows whether it has taken that."""
        if not self.carried or self.transport.is_closing():
            self.transport.close()
            return
        self.reader.stop()
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)

    def finish(self) -> None:
        """Close as soon as nothing is under way (the gateway is stopping)."""
        self._closing = True
        if not self.busy:
            self.transport.close()


def most_connections() -> int:
    """Three quarters of the files this process may open: the others are for what the requests need."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft) * 3 // 4


class OpenConnections:
    """The open connections of a server: how many there may be, and which of them end."""

    def __init__(self, limits: Limits, hosts: HostCheck) -> None:
        self.limits = limits
        self.hosts = hosts
        self.most = limits.connections or most_connections()
        self._open: set[AgentConnection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(list(self._open))

    def adopt(self, conn: AgentConnection) -> None:
        """Take a new connection in; one too many is answered 503."""
        if len(self._open) >= self.most:
            conn.refuse("the gateway has as many connections as it takes; try again", kind="overloaded", status=503)
        else:
            self._open.add(conn)

    def forget(self, conn: AgentConnection) -> None:
        self._open.discard(conn)

    def sweep(self, now: float) -> None:
        """End connections on which nothing happens any more."""
        limits = self.limits
        for conn in self:
            head_since = conn.reader.head_since
            if conn.paused_since is not None and now - conn.paused_since > STALLED_S:
                conn.transport.abort()
            elif conn.busy:
                continue
            elif head_since is not None and now - head_since > limits.head_s:
                conn.refuse("the headers of the request did not come in time", kind="timeout", status=408)
            elif now - conn.active_s > limits.idle_connection_s:
                conn.transport.close()
