"""A call's way to an inference server and back: choosing one, sending, the reply's bytes, trying again."""

from __future__ import annotations

import asyncio
import errno
import sys
import time

from ...messages.errors import RequestError
from ..capture.versions import brings_tokens
from ..http.messages import unread
from ..sessions.session import Session
from ..upstreams.pool import UpstreamConnection
from ..upstreams.router import Worker
from .context import Context
from .engine import EngineSide
from .running import RunningCall
from .states import State

MAX_TRIES = 4
_TRY_ELSEWHERE = frozenset({429, 502, 503, 504})


class Transport:
    """How the request gets to a server and the reply's bytes back: `Exchange`, and `gateway.sampling_services`."""

    __slots__ = ("_context", "_engine", "_incoming", "_owner", "_session", "_worker")

    def __init__(self, owner: RunningCall, engine: EngineSide, context: Context, session: Session) -> None:
        self._owner = owner
        self._engine = engine
        self._incoming = engine.incoming
        self._context = context
        self._session = session
        self._worker: Worker | None = None  # the server that has the call

    def route(self) -> None:
        """Choose a server and send the request to it."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop: the call has ended and needs no reply."""
        raise NotImplementedError

    def close(self) -> None:
        """The call has ended."""

    def weights_change(self, *, slow: bool) -> None:
        """Other weights are about to be published. ``slow``: the agent's connection holds the reply up."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def _enter(self, tried: tuple[Worker, ...] = ()) -> Worker | None:
        """Choose a server that was not tried yet, and count the call there. None: there is none, and the call fails."""
        session = self._session
        worker = self._context.router.pick(session.worker, tried)
        if worker is None:
            error = RequestError("no inference server answered; see the gateway's log", kind="upstream")
            if not tried:
                why = "the gateway has no inference server; add one with POST /admin/workers"
                error = RequestError(why, kind="overloaded")
            self._owner.fail(error)
            return None
        session.worker = self._worker = worker
        worker.inflight += 1
        worker.calls += 1
        self._incoming.kind, self._incoming.upstream_id = worker.config.engine, worker.id
        return worker

    def _leave(self) -> Worker | None:
        """Let go of the server; returns it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.inflight -= 1
        return worker


class Exchange(Transport):
    """Over connections to servers: the `Reader` of the one in use. ``tried`` are the servers that had the call before."""

    __slots__ = ("_connecting", "_second", "_stream", "_tried", "_until", "_up")

    def __init__(
        self, owner: RunningCall, engine: EngineSide, context: Context, session: Session, *, stream: bool
    ) -> None:
        super().__init__(owner, engine, context, session)
        self._stream = stream
        self._tried: tuple[Worker, ...] = ()
        self._second = False  # whether the only server has been given a second chance
        self._until: float | None = None  # when it has waited long enough for a server to come up
        self._up: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None

    # -- sending

    def route(self) -> None:
        worker = self._enter(self._tried)
        if worker is None:
            return
        connection = worker.pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._connecting = asyncio.ensure_future(self._connect(worker))

    async def _connect(self, worker: Worker) -> None:
        try:
            try:
                connection = await worker.pool.connect()
            except OSError as e:
                self._leave()
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    why = "the gateway has no connection left for this call: raise `ulimit -n`"
                    self._owner.fail(RequestError(why, kind="overloaded"))
                    return
                worker.failed(time.monotonic(), unreachable=True, why=f"it cannot be reached: {e}")
                self._again(worker, "the inference server cannot be reached")
            else:
                self._send(connection)
        except Exception as e:
            self._owner.broke(e)

    def _send(self, connection: UpstreamConnection) -> None:
        worker = self._worker
        if worker is None:  # pragma: no cover  (a connection is only asked for with a worker)
            return
        try:
            path, pieces = self._engine.request_for(worker)
        except RequestError as e:
            self._leave()
            worker.pool.give(connection)
            self._owner.fail(e)
            return
        self._up = connection
        self._incoming.status = 0
        self._incoming.span.sent()
        self._owner.become(State.SENT)
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        head = worker.head(path, size, self._session.id_bytes)
        connection.send(self, head, *pieces)

    def _leave(self) -> Worker | None:
        self._up = None
        return super()._leave()

    def _again(self, worker: Worker, why: str, *, once_more: bool = False) -> None:
        """Try another server as long as nothing has reached the agent. ``once_more``: or this one, if there is no other."""
        owner, context = self._owner, self._context
        if owner.state is State.RELAYING:
            owner.fail(RequestError(why, kind="upstream"))
            return
        tried = (*self._tried, worker)
        other = context.router.pick(None, tried)
        if other is not None and len(tried) < MAX_TRIES:
            self._tried = tried
        elif other is None and once_more and not worker.draining:
            self._second = True
        else:
            until = context.outage.hold(owner, self._until)
            if until is None:
                owner.fail(RequestError(why, kind="upstream"))
            else:  # then all servers count as not tried
                self._until, self._tried, self._second = until, (), False
                owner.forget()
            return
        owner.forget()
        context.counters["retries"] += 1
        owner.go()

    # -- the reply

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        incoming = self._incoming
        incoming.status, incoming.headers = status, headers
        try:
            if not self._stream:  # all of it was sampled before
                incoming.span.arrived(incoming.received)
                incoming.span.sampled()
        except Exception as e:
            self._owner.broke(e)

    def on_data(self, pieces: list[bytes]) -> None:
        incoming = self._incoming
        try:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            span = incoming.span
            span.arrived(incoming.received)
            incoming.received += len(data)
            incoming.parts.append(data)
            if self._stream and incoming.status == 200:
                if incoming.first_token_s is None:
                    incoming.first_token_s = time.time()
                if span.changed and brings_tokens(data):
                    span.sampled()
                self._owner.take(data)
        except Exception as e:
            self._owner.broke(e)

    def on_lost(self, error: Exception | None, *, reused: bool, began: bool) -> None:
        worker = self._leave()
        if worker is None:
            return
        try:
            if reused and not began and self._session.worker is worker and not worker.draining:
                # The server closed an idle connection at the moment we used it. It did not see the request.
                self._owner.route()
                return
            why = "the inference server closed the connection before its reply was whole"
            worker.failed(time.monotonic(), unreachable=True, why=why)
            self._again(worker, why, once_more=not self._second)
        except Exception as e:
            self._owner.broke(e)

    def on_complete(self) -> None:
        worker = self._leave()
        if worker is None:
            return
        try:
            status = self._incoming.status
            if status == 200:
                worker.succeeded()
                self._owner.complete()
                return
            if status >= 500:
                worker.failed(time.monotonic(), unreachable=False, why=f"it answered {status} several times in a row")
            tried = (*self._tried, worker)
            if status in _TRY_ELSEWHERE and len(tried) < MAX_TRIES and self._context.router.pick(None, tried):
                self._again(worker, "")
            else:
                self._owner.pass_error(status, self._incoming.body())
        except Exception as e:
            self._owner.broke(e)

    # -- from the call

    def stop(self) -> None:
        up, worker = self._up, self._worker
        self._leave()
        if self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()
        if up is not None:
            up.abort()
        if worker is not None:
            self._engine.stop(worker)

    def weights_change(self, *, slow: bool) -> None:
        if self._up is None:
            return
        incoming = self._incoming
        arrived = sys.maxsize if slow else incoming.received + unread(self._up.transport)
        if not self._stream and arrived:
            arrived = sys.maxsize  # it is whole, and its head tells that
        incoming.span.change(arrived)

    def pause_reading(self) -> None:
        if self._up is not None:
            self._up.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._up is not None:
            self._up.transport.resume_reading()
