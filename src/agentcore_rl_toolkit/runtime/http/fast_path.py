"""Warm invocations without a task: a request to a session that is there, answered by a short reply.

Theory of operation. A call is taken when nothing about it can take time or go wrong before the agent sees it: its session is
ready and has a kept connection, its caller is known to be this machine's user or its signature verifies, no fault is planned.
It is then bytes to the agent, and one callback when the reply is whole. A reply that is anything else (an error, a stream, a
large body, a broken connection, a deadline that passed) is handed over to the same `relay` that serves every other request,
which goes on from there. One timer serves the deadlines of all calls: they are equally long, so the oldest call's comes first.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from ..._servers.callers import Callers
from ..api import signatures
from ..runtime import Runtime
from ..sessions.connection import Connection, header
from ..sessions.session import Session
from ..sessions.stores import ASKS_FOR_A_RECORD
from ..wire import SESSION_HEADER, Named, Route, WireError, check_headers, split_path
from .invoke import INVOKE, WHOLE_BYTES, Asked, Work, relay, reply_headers, request_headers, request_id_of
from .protocol import Request, RuntimeProtocol, Send

MAX_URL_BYTES = 2_000  # of those that are remembered
Finish = Callable[[str, Work, Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """What an address names."""

    named: Named
    runtime_id: str
    endpoint: str
    raw_path: bytes
    query_string: bytes


@functools.lru_cache(4096)
def target_of(url: bytes) -> Target | None:
    """What a POST to this address invokes, or None when it is no invocation."""
    raw_path, _, query_string = url.partition(b"?")
    if not raw_path.startswith(b"/runtimes/") or b"#" in url or not raw_path.isascii():
        return None
    pieces, query = split_path(raw_path, query_string)
    if len(pieces) != 3 or pieces[2] != "invocations":
        return None
    route = Route(pieces[2], pieces[1], query)
    try:
        return Target(route.named, route.named.runtime_id, route.qualifier, raw_path, query_string)
    except WireError:
        return None  # the long way has the words


class DirectInvocations:
    """The calls that are under way. ``finish`` is what `RuntimeApp.finish` is."""

    def __init__(self, runtime: Runtime, callers: Callers[Session], finish: Finish) -> None:
        self.runtime = runtime
        self.finish = finish
        self._callers = callers
        self._calls: dict[DirectCall, None] = {}  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    def target(self, url: bytes) -> Target | None:
        """What a POST to this address invokes; None: not for us."""
        found = target_of(url) if len(url) <= MAX_URL_BYTES else None
        return found if found is not None and self.runtime.registry.is_here(found.named) else None

    def begin(self, protocol: RuntimeProtocol, request: Request) -> bool:
        """Take a request, or leave it without having done anything."""
        runtime, target = self.runtime, request.target
        named = request.by_name.get(SESSION_HEADER)
        if len(request.body) > 1:
            request.body = [b"".join(request.body)]
        if named is None or runtime.faults.rules or any(ASKS_FOR_A_RECORD in part for part in request.body):
            return False
        if not runtime.config.credentials and not self._is_user(protocol):
            return False
        key = (target.runtime_id, target.endpoint, named.decode("latin-1"))
        session = runtime.table.sessions.get(key)
        if session is None or session.state != "ready" or not runtime.serves(target.runtime_id, target.endpoint):
            return False
        try:
            self._check(request)
        except WireError:
            return False  # the long way refuses it in the same words
        connection = session.kept_connection()
        if connection is None:
            return False
        now = time.monotonic()
        try:
            runtime.quotas.request(INVOKE, target.runtime_id, now)
        except WireError as e:
            session.idle_connections.append(connection)
            protocol.hand_over(functools.partial(self.finish, INVOKE, functools.partial(_refuse, e)))
            return True
        session.clock.begin(now)
        session.invocations += 1
        request_id = request_id_of(request.by_name)
        call = DirectCall(self, protocol, request, session, connection, request_id)
        sent = request_headers(session, request.headers, request_id)
        connection.listener = call.progress
        connection.start(b"POST", session.agent.invocation_path, sent, request.body)
        self._calls[call] = None
        if self._timer is None:
            self._timer = protocol.loop.call_at(call.deadline_s, self._expire)
        return True

    def _is_user(self, protocol: RuntimeProtocol) -> bool:
        """Whether the connection is known to be a user's of this machine; asked once per connection."""
        peer = protocol.peer
        if peer.caller is None:
            peer.caller = self._callers.known(cast(Any, protocol.client), cast(Any, protocol.server))
        return peer.caller is not None and peer.caller.is_user

    def _check(self, request: Request) -> None:
        """Raises: WireError 403, 400."""
        credentials = self.runtime.config.credentials
        if credentials:
            signatures.verify(
                credentials,
                method="POST",
                raw_path=request.target.raw_path,
                query_string=request.target.query_string,
                headers=request.headers,
                body=request.body,
                now=time.time(),
            )
        check_headers(request.by_name)

    def forget(self, call: DirectCall) -> None:
        """The call is over, or somebody else's."""
        self._calls.pop(call, None)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for call in list(self._calls):
            if call.deadline_s > loop.time():
                self._timer = loop.call_at(call.deadline_s, self._expire)
                return
            call.leave()


class DirectCall:
    """One call, from the request that is on its way to the agent to the reply."""

    __slots__ = ("_connection", "_direct", "_protocol", "_request", "_request_id", "_session", "deadline_s")

    def __init__(
        self,
        direct: DirectInvocations,
        protocol: RuntimeProtocol,
        request: Request,
        session: Session,
        connection: Connection,
        request_id: str,
    ) -> None:
        self._direct = direct
        self._request_id = request_id
        self._protocol = protocol
        self._request = request
        self._session = session
        self._connection = connection
        self.deadline_s = protocol.loop.time() + direct.runtime.config.times.invoke_timeout_s

    def progress(self) -> None:
        """There is more of the reply."""
        connection = self._connection
        if connection.complete and connection.status < 400:
            self._answer()
        elif connection.complete or connection.lost:
            self.leave()
        elif connection.head_done:
            length = header(connection.headers, b"content-length")
            if length is None or not length.isdigit() or int(length) > WHOLE_BYTES or connection.status >= 400:
                self.leave()

    def _answer(self) -> None:
        session, connection, runtime = self._session, self._connection, self._direct.runtime
        self._direct.forget(self)
        data = connection.take()
        headers = reply_headers(session, self._request.headers, connection.headers, self._request_id)
        headers.append((b"content-length", b"%d" % len(data)))
        connection.listener = None
        session.give_back(connection)
        runtime.table.release(session)
        runtime.metrics.request(INVOKE, 200)
        self._protocol.answer(200, headers, data)

    def leave(self) -> None:
        """Let `relay` go on with it."""
        self._direct.forget(self)
        self._connection.listener = None
        self._protocol.hand_over(functools.partial(self._direct.finish, INVOKE, self._relay))

    async def _relay(self, scope: Any, send: Send) -> None:
        await relay(
            self._direct.runtime.table,
            self._session,
            send,
            headers=self._request.headers,
            body=(),
            request_id=self._request_id,
            scope=scope,
            asked=Asked(self._connection, self.deadline_s),
        )


async def _refuse(error: WireError, scope: Any, send: Send) -> None:
    raise error
