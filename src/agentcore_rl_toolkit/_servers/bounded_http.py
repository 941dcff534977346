"""uvicorn's HTTP protocol with bounds: on heads, on idle connections, on their number; and the check of Host and Origin.

uvicorn has none of these on its httptools protocol: a head may grow without end, and a connection that never sends a whole one
stays for ever. All connections of a server share one `Bounds`, whose single timer looks at all of them once a second, so that a
request costs no timer of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .connection_room import ConnectionRoom, default_limit
from .host_check import HostCheck, Refusal

HEADER_BYTES = 64 * 2**10
LINGER_S = 2.0  # a client that is still sending when it is refused would lose the response to a reset connection
LOOK_S = 1.0
Headers = list[tuple[bytes, bytes]]
TOO_LARGE = Refusal(431, f"the headers of a request may have {HEADER_BYTES} bytes together")
TOO_LATE = Refusal(408, "the headers of the request did not come in time")


def plain_error(refusal: Refusal) -> tuple[Headers, bytes]:
    """Headers and body of a refusal, in the shape that most clients show: an object with a message."""
    body = json.dumps({"error": {"message": refusal.message, "type": "invalid_request_error"}}).encode()
    return [(b"content-type", b"application/json")], body


@dataclass(kw_only=True)
class Bounds:
    """What the connections of one server share. Units: seconds.

    ``head_s`` is how long a head may take from its first byte to its last, ``fresh_s`` how long a new connection may stay without
    any, ``body_s`` the longest pause within a body.
    ``error`` writes a refusal in the server's own shape.
    """

    hosts: HostCheck | None = None
    connections: int | None = None
    head_s: float = 30.0
    fresh_s: float = 75.0
    body_s: float = 60.0
    error: Callable[[Refusal], tuple[Headers, bytes]] = plain_error

    def __post_init__(self) -> None:
        self.room = ConnectionRoom(self.connections or default_limit())
        self._looking: asyncio.TimerHandle | None = None

    def watch(self, protocol: BoundedProtocol) -> None:
        """Keep looking at the connections of this protocol's server, while there are any."""
        if self._looking is None:
            self._looking = protocol.loop.call_later(LOOK_S, self._look, protocol)

    def _look(self, protocol: BoundedProtocol) -> None:
        self._looking = None
        now = protocol.loop.time()
        bounded = [c for c in protocol.connections if isinstance(c, BoundedProtocol)]
        for each in bounded:
            each.look(now)
        if bounded:
            self._looking = protocol.loop.call_later(LOOK_S, self._look, bounded[0])


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A refused one gets its response, and nothing it still sends is kept."""

    def __init__(self, *args: Any, bounds: Bounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds = bounds
        self.body_s = bounds.body_s
        self.address = ""
        self.used = False
        self.refused = False
        self._waits_since = 0.0  # for a request; holds only while none is under way
        self._head_since: float | None = None
        self._last_s = 0.0
        self._silent = 0  # bytes since the parser last had something to say
        self._fed = 0  # bytes that it was given last
        self._in_body = False
        self._upgraded = False

    # -- what the room asks
    @property
    def idle_since(self) -> float | None:
        """Since when the connection waits for a request; None while one is under way."""
        return None if self.under_way() else self._waits_since

    def under_way(self) -> bool:
        """Whether a request's head was read and its response is not complete."""
        cycle: Any = self.cycle  # None until there is one, whatever uvicorn's annotation says
        return cycle is not None and not cycle.response_complete

    # -- from the transport
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self._last_s = self.loop.time()
        self.address = self.client[0] if self.client is not None else ""
        room = self.bounds.room
        if room.opened(self.address) or len(self.connections) > room.limit:
            everyone = [c for c in self.connections if isinstance(c, BoundedProtocol)]
            for each in room.make_room(self, everyone, self._last_s):
                each.refused = True
                each.transport.abort()
        self.bounds.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._upgraded:
            self.bounds.room.closed(self.address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        self._unset_keepalive_if_required()
        self._last_s = self.loop.time()
        self._silent += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._unsupported_upgrade_warning()
            return
        except httptools.HttpParserError:
            if not self.refused:
                self.refused = True
                self.send_400_response("Invalid HTTP request received.")
            return
        self._fed = len(data)
        if self._silent > HEADER_BYTES:
            self.refuse(TOO_LARGE)
        elif self._head_since is None and not self._in_body and not self.under_way():
            self._head_since = self._last_s

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self.bounds.room.closed(self.address)
        super().handle_websocket_upgrade()

    # -- from the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # a trailer: nobody reads those
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.examine()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.message_is_complete()
        super().on_message_complete()

    def message_is_complete(self) -> None:
        """Note that the parser is between two requests."""
        self._in_body = False
        self._silent = 0

    def examine(self) -> None:
        """Refuse a request by its head, before anybody else sees it. Raises: ValueError, which stops the parser."""
        size = self._silent + self._fed  # or less
        self._silent = 0
        self._head_since = None
        if size > HEADER_BYTES and sum(len(n) + len(v) + 4 for n, v in self.headers) + len(self.url) > HEADER_BYTES:
            self.refuse(TOO_LARGE)
            raise ValueError(TOO_LARGE.message)
        if self.bounds.hosts is not None:
            host = origin = None
            for name, value in self.headers:
                if name == b"host":
                    host = value if host is None else b"?"  # two hosts are none: RFC 9112, 3.2
                elif name == b"origin":
                    origin = value
            refusal = self.bounds.hosts.refusal(host, origin)
            if refusal is not None:
                self.refuse(refusal)
                raise ValueError(refusal.message)
        self._in_body = self.used = True

    # -- ending
    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error and end the connection: what follows cannot be told apart from the refused request."""
        if self.refused or self.transport.is_closing():
            return
        self.refused = True
        if self.under_way():  # the response that is being written must not get an error in its middle
            if self._in_body:
                self.transport.close()
            else:
                self.end_after_response()
            return
        headers, body = self.error(refusal)
        lines = [STATUS_LINE[refusal.status], *(b"%b: %b\r\n" % pair for pair in headers)]
        lines.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(lines) + (b"" if self.parser.get_method() == b"HEAD" else body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def error(self, refusal: Refusal) -> tuple[Headers, bytes]:
        """Headers and body of the response to a refused request."""
        return self.bounds.error(refusal)

    def end_after_response(self) -> None:
        """Close the connection when the response that is being written is complete."""
        self.cycle.keep_alive = False

    def look(self, now: float) -> None:
        """Close what is overdue."""
        bounds, cycle = self.bounds, self.cycle
        if self.refused or self.transport.is_closing():
            return
        if not self.under_way():
            waited_s = now - self._waits_since
            if self._head_since is not None and now - self._head_since > bounds.head_s:
                self.refuse(TOO_LATE)
            elif (not self.used and waited_s > bounds.fresh_s) or (self._in_body and waited_s > bounds.body_s):
                self.transport.close()
        elif self._in_body and cycle is not None:
            waits = self.flow.read_paused or cycle.waiting_for_100_continue
            if cycle.more_body and not waits and now - self._last_s > self.body_s:
                self.transport.close()
