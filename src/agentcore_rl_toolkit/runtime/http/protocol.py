"""uvicorn's HTTP protocol, with the bounds of all our servers (`_servers.bounded_http`) and three additions.

A reply can be one write; the application can break a connection off; and a warm invocation goes past ASGI (`fast_path`):
a scope, a cycle, a task, its events and timers are most of what such a call costs.

Theory of operation. Requests are read by uvicorn's parser. One that may be taken directly is collected without a scope; when the
bytes at hand are parsed and nothing came after it, it is offered to ``direct``, which takes it or not. While it is under way,
whatever else the caller sends is kept unparsed, so nothing changes under it. Every other request is uvicorn's, from its head on
or, when it turns out not to be for ``direct``, as if it had just arrived.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..._servers.bounded_http import BoundedProtocol
from ..._servers.callers import PEER, Peer
from ..._servers.host_check import Refusal
from ..wire import Headers, WireError, invalid

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]
_KEY = "agentcore_rl.transport"
DIRECT_BYTES = 64 * 1024  # larger bodies are worth a task


@dataclass(slots=True)
class Request:
    """A POST that is collected, or received whole. ``by_name``: its headers, the last of each name."""

    target: Any
    url: bytes
    headers: Headers
    by_name: dict[bytes, bytes]
    body: list[bytes] = field(default_factory=list)
    keep_alive: bool = True


class Direct(Protocol):
    """Takes requests that need no ASGI application; answers them by the protocol's `answer` or `hand_over`."""

    def target(self, url: bytes) -> Any:
        """What a POST to this address is for; None: not for us."""

    def begin(self, protocol: RuntimeProtocol, request: Request) -> bool:
        """Take the request, or leave it without having done anything."""


def late_body(pause_s: float) -> WireError:
    """The answer to a caller whose body does not come."""
    return invalid(f"the rest of the payload did not come within {pause_s:g} s", field="payload")


class HoldingTransport:
    """A transport that, when asked to, sends its next write together with the one after it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._hold = False
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def hold(self) -> None:
        """Keep the next write back until there is another."""
        self._hold = True

    def write(self, data: bytes) -> None:
        if self._hold:
            self._hold, self._held = False, data
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        if self._held:
            self.write(b"")
        self._transport.close()


class RuntimeProtocol(BoundedProtocol):
    """Puts the transport into the scope. ASGI itself has no way to end a connection without a reply.

    ``direct`` may take requests, but for those on ``asgi_port``, whose refusals ``asgi_error`` writes. ``body_timeout_s`` is the
    longest pause within their bodies.
    """

    def __init__(
        self,
        *args: Any,
        direct: Direct | None = None,
        asgi_port: int | None = None,
        asgi_error: Callable[[Refusal], tuple[Headers, bytes]] | None = None,
        body_timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._body_timeout_s = body_timeout_s
        self._body_check: asyncio.TimerHandle | None = None
        self._direct = direct
        self._asgi = asgi_port, asgi_error
        self._arriving: Request | None = None  # what is being received, where it may go directly
        self._received: Request | None = None
        self._taken: Request | None = None  # by `direct`, and not answered yet
        self._early: list[bytes] = []
        self._leaving = False
        self._idle_check: asyncio.TimerHandle | None = None
        self.peer = Peer()

    # -- from the transport
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._wire = transport  # without the holding, which is for replies in two parts
        super().connection_made(HoldingTransport(transport))  # type: ignore[arg-type]
        if self._on_asgi_port():
            self._direct = None
        else:
            self.body_s = math.inf  # late bodies are answered here

    def _on_asgi_port(self) -> bool:
        return self.server is not None and self.server[1] == self._asgi[0]

    def data_received(self, data: bytes) -> None:
        if self._taken is not None:
            self._early.append(data)
            self.transport.pause_reading()
            return
        super().data_received(data)
        request = self._received
        if request is not None and self._direct is not None:
            self._received, self._taken = None, request
            if not self._direct.begin(self, request):
                self._taken = None
                self._open_cycle(request, self.app)
        elif self._arriving is not None and self._body_check is None:  # its body is still to come
            self._body_check = self.loop.call_later(self._body_timeout_s, self._check_body)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._early.clear()
        for check in (self._idle_check, self._body_check):
            if check is not None:
                check.cancel()
        self._idle_check = self._body_check = None

    def error(self, refusal: Refusal) -> tuple[Headers, bytes]:
        asgi_error = self._asgi[1] if self._on_asgi_port() else None
        return super().error(refusal) if asgi_error is None else asgi_error(refusal)

    def end_after_response(self) -> None:
        if self._taken is not None:
            self._leaving = True
        elif super().under_way():
            super().end_after_response()

    def shutdown(self) -> None:
        if self._taken is not None:
            self._leaving = True
        else:
            super().shutdown()

    # -- from the parser
    def on_message_begin(self) -> None:
        if self._received is not None:  # another request came along with it: their order is uvicorn's business
            request, self._received = self._received, None
            self._open_cycle(request, self.app)
        self.url = b""
        self.headers = []
        self._arriving = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.examine()
        if self._direct is not None and self.parser.get_method() == b"POST":
            target = self._direct.target(self.url)
            if target is not None:
                self._arriving = self._plain(target)
        if self._arriving is None:
            url, headers = self.url, self.headers
            super().on_message_begin()
            self.url = url
            self.headers += headers
            self.expect_100_continue = any(k == b"expect" and v.lower() == b"100-continue" for k, v in headers)
            self.scope[_KEY] = self.transport  # type: ignore[literal-required]  # an addition to the specification's keys
            self.scope[PEER] = self.peer  # type: ignore[literal-required]
            HttpToolsProtocol.on_headers_complete(self)

    def _plain(self, target: Any) -> Request | None:
        """The request, when it is like nearly all of them and no other is under way."""
        by_name = dict(self.headers)
        length = by_name.get(b"content-length", b"0")
        plain = (
            length.isdigit()
            and int(length) <= DIRECT_BYTES
            and b"transfer-encoding" not in by_name
            and b"expect" not in by_name
            and not super().under_way()
            and self.parser.get_http_version() == "1.1"
            and not self.parser.should_upgrade()
        )
        return Request(target, self.url, self.headers, by_name) if plain else None

    def under_way(self) -> bool:
        return self._taken is not None or self._arriving is not None or super().under_way()

    def on_body(self, body: bytes) -> None:
        if self._arriving is not None:
            self._silent = 0
            self._arriving.body.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._arriving is None:
            super().on_message_complete()
            return
        self.message_is_complete()
        self._received, self._arriving = self._arriving, None
        self._received.keep_alive = self.parser.should_keep_alive()

    # -- from whoever took a request
    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the reply, whole, and go on with the caller's next request. Does nothing for a caller that is gone."""
        request, self._taken = self._taken, None
        self.server_state.total_requests += 1
        if request is None or self._wire.is_closing():
            return
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        stays = request.keep_alive and not self._leaving
        lines.append(b"\r\n" if stays else b"connection: close\r\n\r\n")
        lines.append(body)
        self._wire.write(b"".join(lines))
        if not stays:
            self._wire.close()
            return
        self._last_s = self._waits_since = self.loop.time()
        if self._idle_check is None:
            self._idle_check = self.loop.call_later(self.timeout_keep_alive, self._check_idle)
        if self._early:  # not at once: a thousand requests sent ahead would be a thousand calls deep
            self.loop.call_soon(self._read_on)

    def hand_over(self, app: App) -> None:
        """Let an ASGI application answer the request that was taken; its body is not given to it."""
        request, self._taken = self._taken, None
        if request is None:
            raise RuntimeError("no request is under way")
        request.body.clear()
        self._open_cycle(request, app)
        if self._leaving:
            self.cycle.keep_alive = False
        if self._early:
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._early and not self.transport.is_closing():
            data = b"".join(self._early)
            self._early.clear()
            self.transport.resume_reading()
            self.data_received(data)

    def _check_body(self) -> None:
        self._body_check = None
        if self._arriving is None or self.transport.is_closing():
            return
        left_s = self._last_s + self._body_timeout_s - self.loop.time()
        if left_s > 0:
            self._body_check = self.loop.call_later(left_s, self._check_body)
            return
        error = late_body(self._body_timeout_s)
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nx-amzn-errortype: %s\r\n"
        end = b"connection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % (len(body), error.code.encode()) + end + body)
        self.transport.close()

    def _check_idle(self) -> None:
        """One timer for many replies: it looks at what it finds when it fires."""
        self._idle_check = None
        uvicorns = self.timeout_keep_alive_task is not None or super().under_way()
        if self._taken is not None or uvicorns or self.transport.is_closing():
            return  # the next answer sets another
        left_s = self._last_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle_check = self.loop.call_later(left_s, self._check_idle)
        else:
            self.transport.close()

    def _open_cycle(self, request: Request, app: App) -> None:
        """What uvicorn does when it has read a head, for one that it has not seen."""
        super().on_message_begin()
        self.url = request.url
        self.headers += request.headers
        raw_path, _, query = request.url.partition(b"?")
        scope: Any = self.scope
        scope["method"] = "POST"
        scope["path"] = self.root_path + unquote(raw_path.decode("ascii"))
        scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        scope["query_string"] = query
        scope[_KEY] = self.transport
        scope[PEER] = self.peer
        cycle = self.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=request.keep_alive,
            on_response=self.on_response_complete,
        )
        cycle.body += b"".join(request.body)
        cycle.more_body = False
        cycle.disconnected = self.transport.is_closing()
        cycle.message_event.set()
        self._start_asgi_task(cycle, app)


# 408 by the name that AWS's clients take for transient: a caller on a busy machine is late, its request is not wrong.
_REFUSED_AS = {403: "AccessDeniedException", 421: "AccessDeniedException", 408: "RequestTimeoutException"}


def aws_error(refusal: Refusal) -> tuple[Headers, bytes]:
    """Headers and body of a refusal, as AWS's clients read them."""
    code = _REFUSED_AS.get(refusal.status, "ValidationException")
    body = json.dumps({"message": refusal.message}).encode()
    return [(b"content-type", b"application/json"), (b"x-amzn-errortype", code.encode())], body


async def send_whole(
    scope: Mapping[str, Any], send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """Send a complete reply. Head and body are one write: each wakes the caller, most of what a short reply costs."""
    transport = scope.get(_KEY)
    if transport is not None:
        transport.hold()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def break_off(scope: Mapping[str, Any]) -> None:
    """Reset the caller's connection and wait until uvicorn knows it."""
    transport = scope.get(_KEY)
    if transport is None:
        raise ConnectionResetError("the connection is to be broken off")
    transport.abort()
    while not transport.is_closing():  # noqa: ASYNC110  # the transport has a flag, no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)  # connection_lost is called from the loop, after which uvicorn expects no reply


async def hang_up(scope: Mapping[str, Any]) -> None:
    """End the caller's connection in the middle of a reply, after what was sent of it."""
    transport = scope[_KEY]
    transport.close()
    await asyncio.sleep(0.001)
