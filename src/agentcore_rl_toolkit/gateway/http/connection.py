"""The side of a connection that faces an agent (or a trainer): reads requests, hands them on one at a time, writes replies."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools

from ..calls.dedup import not_taken
from ..errors import RequestError
from .body import LongBody
from .messages import CONTINUE, Request, error_reply, path_of, reply, retry_after, unconfirmed

if TYPE_CHECKING:
    from ..calls.call import Call
    from ..calls.dedup import Answer
    from ..server import Gateway

WRITE_HIGH = 256 * 2**10
LINGER_S = 2.0  # a client that is still sending when it is refused would lose the answer to a reset connection
RESET_S = 30.0  # systems on the way reset connections too, that were idle for a minute or more
SETTLED_S = 1.0  # a system may wait for 0.2 s before it confirms what it has got
SCRATCH = 64 * 2**10  # bytes read at a time, until a long body is known to follow
MANY_PIECES = 8  # of one read; a body in chunks of two bytes would take thirty times its size in memory
SMALL_BODY = 64 * 2**10  # whoever sends more than this shows a key first, and counts against what may be under way


class AgentConnection(asyncio.BufferedProtocol):
    """One client connection. ``call`` is the model call it is waiting for, ``task`` the administrative request."""

    __slots__ = (
        "_between",
        "_body",
        "_closing",
        "_counted",
        "_expected",
        "_gateway",
        "_head_bytes",
        "_head_said",
        "_headers",
        "_hosts",
        "_length",
        "_long",
        "_parser",
        "_queue",
        "_reading",
        "_refused",
        "_scratch",
        "_silent",
        "_size",
        "_unconfirmed",
        "_url",
        "address",
        "busy",
        "call",
        "carried",
        "head_since",
        "last_s",
        "paused_since",
        "task",
        "transport",
        "used",
        "writable",
    )

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._scratch = gateway.scratch
        self._hosts = gateway.hosts
        self._between = True  # no request has begun
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._size = 0
        self._length = 0  # of the body, where it is long and told
        self._long: LongBody | None = None  # of it, when the parser has nothing more to find in it
        self._head_said = (b"", False)  # method and whether to keep the connection, of such a request
        self._silent = 0  # bytes since the parser last had something to tell
        self._counted = 0  # bytes of this request in the gateway's `receiving`
        self._reading = True
        self._refused = False
        self._expected = False  # a client that sends ahead waits for "100 Continue": not in the middle of a reply
        self._closing = False
        self._unconfirmed: int | None = None  # bytes that the client's system had not confirmed when it hung up
        # Replies that nothing shows to have been taken yet, and how many of the last bytes are of no use to the agent
        # (None: every byte is).
        self.carried: list[tuple[Answer, int | None]] = []
        self.busy = False
        self.call: Call | None = None
        self.task: asyncio.Task[None] | None = None
        self.transport: Any = None
        self.paused_since: float | None = None
        self.writable: asyncio.Future[None] | None = None
        self.address = ""
        self.used = False
        self.head_since: float | None = None  # while a head is on its way
        self.last_s = time.monotonic()

    @property
    def idle_since(self) -> float | None:
        """Since when it waits for a request; None while one is under way."""
        return None if self.busy or not (self._between or self.head_since is not None) else self.last_s

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(high=WRITE_HIGH)
        self._gateway.adopt(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._long is None else self._long.space()

    def buffer_updated(self, nbytes: int) -> None:
        if self.carried and not self.busy:  # whoever asks on has read what came before
            self.carried.clear()
        if self._long is not None:
            self._take_on(self._long, nbytes)
            return
        if not self._refused:
            self._take(bytes(self._scratch[:nbytes]))

    def _take(self, data: bytes) -> None:
        self._silent += len(data)
        at = len(self._body)
        try:
            self._parser.feed_data(data)
            if len(self._body) > at + MANY_PIECES:
                self._body[at:] = [b"".join(self._body[at:])]
            if self._length:
                self._look_away()
        except httptools.HttpParserUpgrade as e:
            self._stay(data[e.args[0] :])
        except httptools.HttpParserError as e:
            self.refuse(f"the request is not valid HTTP: {e}")
        if self._silent > self._gateway.limits.header_bytes:
            self._refuse_head()

    def _look_away(self) -> None:
        """The head is read, and how much body follows: the parser would only copy the rest of it once more."""
        length, self._length = self._length, 0
        parser = self._parser
        plain = parser.get_http_version() == "1.1" and not parser.should_upgrade()
        if plain and length > self._size and not self._between and not self._refused:
            self._long = LongBody(length, self._body)
            self._body.clear()
            self._head_said = parser.get_method(), parser.should_keep_alive()
            self._parser = httptools.HttpRequestParser(self)

    def _take_on(self, body: LongBody, count: int) -> None:
        """So many more bytes of the body were written to where it stays."""
        piece = body.filled(count)
        if piece is not None:
            self._body.append(piece)
        self._count(count)
        if body.left == 0 and not self._refused:
            self._long = None
            self._complete(*self._head_said)

    def _stay(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 with a client that offered another protocol (Java's client offers h2c): RFC 9110, 7.8."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refuse("this server is no proxy", kind="method_not_allowed")
        if self._refused:
            return
        self._parser = httptools.HttpRequestParser(self)
        head = [b"%b %b HTTP/1.1" % (method, self._url)]
        head += [b"%b: %b" % pair for pair in self._headers.items() if pair[0] not in (b"upgrade", b"connection")]
        self._take(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def eof_received(self) -> None:
        if self.carried:
            self._unconfirmed = unconfirmed(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.forget(self)
        if self.carried:
            self._judge(exc)
        self._release()
        self._queue.clear()
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
                not_taken(self._gateway.sessions, answer, sure=sure)

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

    # -- from the parser

    def on_message_begin(self) -> None:
        self._between = False
        self.last_s = self.head_since = time.monotonic()
        self._url = b""
        self._headers = {}
        self._head_bytes = 0
        self._body = []
        self._size = self._silent = self._length = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        limits = self._gateway.limits
        headers = self._headers
        self.head_since, self.used = None, True
        if self._head_bytes > limits.header_bytes:
            self._refuse_head()
            return
        hosts = self._hosts
        if headers.get(b"host") not in hosts.known or b"origin" in headers:
            refusal = hosts.refusal(headers.get(b"host"), headers.get(b"origin"))
            if refusal is not None:
                self.refuse(refusal.message, kind="permission", status=refusal.status)
                return
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > limits.body_bytes):
            self._refuse_body()
            return
        if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            self.refuse("send the request body as it is: this server takes no content-encoding", status=415)
            return
        if b"transfer-encoding" in headers or (length is not None and int(length) > SMALL_BODY):
            path = self._url.partition(b"?")[0]
            try:
                self._gateway.admit(Request(self._parser.get_method(), path, b"", headers, b"", False))
            except RequestError as e:
                self.refuse(e.message, kind=e.kind)
                return
            if length is not None and b"transfer-encoding" not in headers:
                self._length = int(length)
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self._expected = self.busy
            if not self.busy:
                self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body.append(body)
        self._count(len(body))

    def _count(self, size: int) -> None:
        """So many more bytes of a body are held."""
        self._silent = 0
        self._size += size
        if self._size > SMALL_BODY:
            gateway = self._gateway
            gateway.receiving += self._size - self._counted
            self._counted = self._size
            if self._size > gateway.limits.body_bytes:
                self._refuse_body()
            elif gateway.receiving > gateway.limits.receiving_bytes:
                self.refuse("too many large requests are under way; try again", kind="overloaded")

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            self._between = True
            self._silent = 0
            self._release()
            return
        self._complete(parser.get_method(), parser.should_keep_alive())

    def _complete(self, method: bytes, keep_alive: bool) -> None:
        self._between = True
        self._expected = False
        self._silent = 0
        self._release()
        if self._refused:
            return
        body = self._body
        path, _, query = self._url.partition(b"?")
        if path[:1] != b"/":
            path = path_of(path)
        whole = body[0] if len(body) == 1 else b"".join(body)
        request = Request(method, path, query, self._headers, whole, keep_alive)
        self._body = []
        if self.busy:
            self._queue.append(request)
            if self._reading:  # a client that sends ahead waits in the kernel, not in our memory
                self._reading = False
                self.transport.pause_reading()
            return
        self.busy = True
        self._serve(request)

    def _serve(self, request: Request) -> None:
        if request.method != b"HEAD":
            self._gateway.dispatch(self, request)
            return
        # The answer to a HEAD has no body, whatever its length says; only a probe of our health has a use for one.
        well = request.path in (b"/healthz", b"/health")
        self.write(reply(200 if well else 405, b"", headers=((b"allow", b"GET, POST"),), keep_alive=request.keep_alive))
        self.done(keep_alive=request.keep_alive)

    def http10(self) -> bool:
        """Whether the client speaks HTTP/1.0, which knows no chunks."""
        return bool(self._parser.get_http_version() == "1.0")

    # -- towards the client

    def refuse(self, message: str, *, kind: str = "invalid_request", status: int | None = None) -> None:
        """Answer with an error and end the connection: what follows cannot be told apart from the refused request."""
        if self._refused:
            return
        self._refused = True
        self._release()
        self._body.clear()
        self._long = None
        self._queue.clear()
        if self.busy:
            self._closing = True  # the reply that is being written must not get an error in its middle
            return
        dialect = "anthropic" if b"/v1/messages" in self._url else "chat"
        error = RequestError(message, kind=kind, status=status)
        self.transport.write(error_reply(dialect, error, headers=retry_after(error), keep_alive=False))
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)

    def _refuse_head(self) -> None:
        self.refuse(
            f"the request head is larger than {self._gateway.limits.header_bytes} bytes", kind="too_large", status=431
        )

    def _refuse_body(self) -> None:
        self.refuse(f"the request body is larger than {self._gateway.limits.body_bytes} bytes", kind="too_large")

    def _release(self) -> None:
        self._gateway.receiving -= self._counted
        self._counted = 0

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def carries(self, answer: Answer, spare: int | None) -> None:
        """A recorded reply was written; ``spare`` of its last bytes are of no use to the agent, None: it is not streamed."""
        answer.ways += 1
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
        if self._queue:
            # Not at once: a thousand requests sent ahead would be a thousand calls deep.
            asyncio.get_running_loop().call_soon(self._next)
            return
        self.busy = False
        if self._expected:
            self._expected = False
            self.write(CONTINUE)
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()

    def _hang_up(self) -> None:
        """End the connection; behind a recorded reply after the client, which shows whether it has taken that."""
        if not self.carried or self.transport.is_closing():
            self.transport.close()
            return
        self._refused = True
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)

    def _next(self) -> None:
        if self._queue and not self.transport.is_closing():
            self._serve(self._queue.popleft())

    def finish(self) -> None:
        """Close as soon as nothing is under way (the gateway is stopping)."""
        self._closing = True
        if not self.busy:
            self.transport.close()
