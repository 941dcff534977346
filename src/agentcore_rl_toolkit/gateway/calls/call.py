"""One model call, from the agent's request to the record in the store.

A call is three parts. The agent side (`calls.agent`) has the connection, reads the request and writes the reply. The engine
side says how the request is written for a server and how its reply is read (`calls.engine`). A transport brings it there
and the reply's bytes back, trying other servers (`calls.exchange`). What may happen next is one table: `calls.states`.

A reply that is not streamed is kept whole until it is recorded, so a server that dies in the middle of one costs a retry and
not a broken reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from ...errors import CaptureError, UpstreamError
from ...messages.dialects import passthrough
from ...messages.errors import RequestError
from ..capture.asked import TAG
from ..capture.build import build
from ..capture.record import (
    ABORTED,
    ERROR,
    INVALID,
    LOST_WEIGHTS,
    OK,
    PARTIAL,
    REFUSED,
    TURNS,
    UNTRAINABLE,
    CallRecord,
    Captured,
)
from ..capture.versions import bounds
from ..engines.errors import upstream_error
from ..http.connection import AgentConnection
from ..http.messages import LAST_CHUNK, Request, chunk, passed, reply, stream_head
from ..sessions.session import RecordedReply, Session, repeats_of
from . import dedup
from .agent import AgentSide
from .context import Context
from .engine import EngineSide
from .exchange import Exchange, Transport
from .incremental import digest_of
from .running import RunningCall
from .states import ENDS, NEXT, IllegalTransitionError, State

log = logging.getLogger(__name__)

_FEW = 3  # running calls up to which waiting for others to commit with would only be waiting
_MOST_REFUSED = 50  # requests of one session that are entries of it: an agent may repeat one forever
_EVENT_STREAM = ((b"content-type", b"text/event-stream"),)
MakeTransport = Callable[[RunningCall, bool], Transport]


class Call:
    """One model call: its three parts and its state. ``make`` makes the transport where it is not `Exchange`."""

    def __init__(
        self,
        context: Context,
        session: Session,
        agent: AgentSide,
        engine: EngineSide,
        make: MakeTransport | None = None,
    ) -> None:
        self._context = context
        self.engine = engine
        self._make = make
        self._transport: Transport | None = None
        self.session = session
        self.agent = agent
        self.state = State.RECEIVED
        self.call_id = ""
        self.index = -1
        self.started_s = time.time()
        self.deadline: float | None = None
        self.retry_of: str | None = None
        self.tag: str | None = None  # the agent's name for the role of this call
        self._captured: Captured | None = None
        self._stored: CallRecord | None = None
        self._position = -1

    def become(self, state: State) -> None:
        """Raises: IllegalTransitionError."""
        if state not in NEXT[self.state]:
            raise IllegalTransitionError(f"a call that is {self.state} cannot become {state}")
        self.state = state

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    # -- the request

    def begin(self, request: Request) -> None:
        """Check the request, put in what the capture and the session want, and send it on."""
        try:
            self._begin(request)
        except RequestError as e:
            self.refuse(e)
        except Exception as e:
            self.broke(e)

    def _begin(self, request: Request) -> None:
        session, agent, engine, context = self.session, self.agent, self.engine, self._context
        body = agent.receive(request, session)
        if self.tag is not None:
            agent.digest = digest_of(self.tag.encode(), b"%d" % agent.digest)
        idempotency_key = request.headers.get(b"idempotency-key")
        if idempotency_key is not None:
            agent.digest = digest_of(idempotency_key, b"%d" % agent.digest)
        again = idempotency_key is not None or request.headers.get(b"x-stainless-retry-count", b"0") != b"0"
        fields = engine.understand(body)
        # A repetition uses up no turn, so it comes before the session's limits.
        if self._joins(dedup.find(context, session, agent, again=again, key=idempotency_key is not None)):
            return
        session.hold_to_settings(fields)
        if "n" in session.overrides:
            agent.n = passthrough.number(fields["n"]) or 1
        agent.settle(fields)
        if self.tag is not None:
            agent.fields[TAG] = msgspec.Raw(b'"%b"' % self.tag.encode())
        engine.compose(fields)
        self.call_id = next(context.call_ids)
        self.index = session.next_index
        session.next_index += 1
        session.started_turns += 1
        session.inflight.add(self)
        if agent.conn is not None:
            agent.conn.call = self
        self.deadline = context.running.deadline()
        context.running.calls.add(self)
        if self._make is None:
            self._transport = Exchange(self, engine, context, session, stream=agent.stream)
        else:
            self._transport = self._make(self, agent.stream)
        engine.prepare(self, self.call_id)

    def _joins(self, earlier: dedup.Earlier) -> bool:
        """Whether an earlier call answers this one, now or when it ends."""
        agent, conn = self.agent, self.agent.conn
        self.retry_of = earlier.retry_of
        if conn is None or (earlier.running is None and earlier.record is None):
            return False
        self._context.counters["turns_joined"] += 1
        body = b"" if earlier.record is None else agent.replayed(earlier.record)
        self.become(State.JOINED)
        agent.conn = None
        if earlier.record is None or earlier.answer is None:
            earlier.running.take_over(conn, agent.keep_alive)
            return True
        if agent.stream:
            head = stream_head(200, _EVENT_STREAM, keep_alive=agent.keep_alive)
            conn.write(head + chunk(body) + LAST_CHUNK)
        else:
            conn.write(reply(200, body, keep_alive=agent.keep_alive))
        conn.carries(earlier.answer, dedup.behind_the_end(body) if agent.stream else None)
        conn.done(keep_alive=agent.keep_alive)
        return True

    def refuse(self, error: RequestError) -> None:
        """The request never became a call: it is answered, counted, and an entry of the session, but no turn."""
        self._context.counters["refused"] += 1
        session = self.session
        if not session.closed and session.refused < _MOST_REFUSED:
            session.refused += 1
            self._enter(error)
        self.become(State.REFUSED)
        self.agent.fail(error)
        self.agent.close()

    def _enter(self, error: RequestError) -> None:
        """Have a refused request stored: when it was, its status, the field at fault and why."""
        session, agent = self.session, self.agent
        self.call_id, self.index = next(self._context.call_ids), session.next_index
        session.next_index += 1
        agent.fields, agent.long = {}, None
        status, field = (ERROR, "") if error.kind == "internal" else (REFUSED, f"{error.param or ''}: ")
        self._store_error(status, error.status or 400, error.kind, f"{field}{error}")

    # -- on its way

    def go(self) -> None:
        """Off to a server, or wait with everybody else while the gateway is paused."""
        if not self._context.running.paused:
            self.route()
        else:
            self.become(State.HELD)
            self._context.running.hold(self)

    def route(self) -> None:
        """Choose a server and send the request to it."""
        try:
            self.become(State.ROUTED)
            if self._transport is not None:
                self._transport.route()
        except Exception as e:
            self.broke(e)

    def take(self, data: bytes) -> None:
        """Bytes of a good stream have come."""
        agent = self.agent
        try:
            agent.take(data, self.engine)
        except (CaptureError, UpstreamError) as e:
            self._stop()
            self.fail(RequestError(str(e), kind="upstream"))
            return
        if agent.begun and self.state is State.SENT:
            self.become(State.RELAYING)

    def forget(self) -> None:
        """Drop the part of a reply that came, none of which has reached the agent."""
        self.engine.incoming.clear()
        self.engine.forget()
        self.agent.forget()

    def pass_error(self, status: int, body: bytes) -> None:
        """Give the engine's own error to the agent, in the dialect's shape, with its status."""
        error = upstream_error(status, body)
        headers = tuple(pair for pair in passed(self.engine.incoming.headers) if pair[0] != b"content-type")
        self._record_failure(ERROR, status, error.code or error.kind, str(error))
        self._end(State.FAILED, error, headers)

    def fail(self, error: RequestError) -> None:
        """The call cannot be answered, or a stream that has begun cannot go on."""
        if self.ended:
            return
        if self.state is State.RELAYING:
            error = RequestError(str(error), kind="upstream")
            self._record_failure(PARTIAL, self.engine.incoming.status, error.kind, str(error))
        else:
            self._record_failure(ERROR, error.status or 500, error.kind, str(error))
        self._end(State.FAILED, error)

    def broke(self, error: BaseException) -> None:
        """Fail the call after an unexpected error here, so that the agent does not wait for its own deadline."""
        failure = RequestError("the request is nested too deeply")
        if not isinstance(error, RecursionError) or self.state not in (State.RECEIVED, State.RENDERING):
            log.error("call %s of session %s broke", self.call_id, self.session.id, exc_info=error)
            why = f"the gateway could not handle this call ({type(error).__name__}); see its log"
            failure = RequestError(why, kind="internal")
        if self.ended:
            return
        self._stop()
        if self.index < 0:
            self.refuse(failure)
        else:
            self.fail(failure)

    def abort(self, error: RequestError) -> None:
        """Stop the call from our side (deadline, closed session, weight sync) and say why."""
        if self.ended or self._captured is not None:  # of a whole reply the record is with the store: it goes out
            return
        self._stop()
        self.fail(error)

    def _stop(self) -> None:
        if self._transport is not None:
            self._transport.stop()

    def weights_change(self) -> None:
        """Other weights are about to be published: what has come of the reply, read or not, was sampled before."""
        if self._transport is not None:
            conn = self.agent.conn
            self._transport.weights_change(slow=conn is not None and conn.paused_since is not None)

    # -- the record

    def complete(self) -> None:
        """The reply is whole."""
        self.become(State.COMPLETE)
        try:
            self._record()
        except Exception as e:
            self.broke(e)

    def _record(self) -> None:
        engine, incoming = self.engine, self.engine.incoming
        try:
            captured = engine.capture()
        except CaptureError as e:
            captured = Captured(choices=[], complete=True, problem=str(e))
        self._captured = captured
        if captured.error is not None or not captured.complete:
            status = PARTIAL
        elif captured.problem is not None:
            status = INVALID
        elif captured.has_tokens:
            status = OK
        elif incoming.kind != "openai":
            status = INVALID
            captured.problem = (
                "the engine returned no token ids; it must honour return_token_ids (vLLM does since 0.10.2)"
            )
        else:
            status = UNTRAINABLE
        worker = self._context.router.workers.get(incoming.upstream_id or "")
        if worker is not None and worker.forgot:
            captured.untrainable = LOST_WEIGHTS
        self.become(State.RECORDED)
        self._append(status, captured)

    def _build(self, status: str, captured: Captured) -> CallRecord:
        agent, incoming, session = self.agent, self.engine.incoming, self.session
        span = incoming.span
        return build(
            status,
            captured,
            texts=session.texts,
            fields=agent.fields,
            long=None if agent.long is None else (agent.long.text, agent.long.crc, agent.long.seen),
            versions=bounds(captured, span.begun, span.last, changed=span.changed, stream=agent.stream),
            call_id=self.call_id,
            index=self.index,
            dialect=agent.dialect,
            started_s=self.started_s,
            first_token_s=incoming.first_token_s,
            digest=agent.digest,
            retry_of=self.retry_of,
            http_status=incoming.status,
            upstream=incoming.upstream_id,
        )

    def _append(self, status: str, captured: Captured) -> None:
        record = self._stored = self._build(status, captured)
        session, context = self.session, self._context
        if record.status in TURNS:
            session.turns += 1
            context.sessions.turns += 1
        else:
            session.errors += 1
            session.started_turns -= 1
            context.counters["turns_" + record.status] += 1
        if session.closed:
            self._finish(None)
            return
        store = context.sessions.store
        self._position = store.next_call
        session.append()
        store.append(session, record, self._finish, alone=len(context.running) <= _FEW)

    def _record_failure(self, status: str, http_status: int, kind: str, message: str) -> None:
        """Keep a failed call as an event of the session, never as a turn."""
        if self._position >= 0:  # its record is with the store: it is a turn, and who asks again gets its reply
            return
        session = self.session
        session.started_turns -= 1
        self._context.counters["turns_" + status] += 1
        if session.recent is not None and not self.agent.begun:  # with the head of a reply clients do not try again
            repeats_of(session.recent, self.agent.digest).failed += 1
        self._store_error(status, http_status, kind, message)

    def _store_error(self, status: str, http_status: int, kind: str, message: str) -> None:
        session = self.session
        session.errors += 1
        if session.closed:
            return
        record = self._build(status, Captured(choices=[]))
        record.http_status, record.error_type, record.error = http_status, kind, message[:4000]
        session.append()
        self._context.sessions.store.append(session, record)

    def _answer(self) -> RecordedReply | None:
        """The recorded reply, for a repeated request; None when the call is no turn."""
        record, session, agent = self._stored, self.session, self.agent
        if self._position < 0 or record is None or record.status not in TURNS:
            return None
        found = RecordedReply(self._context.sessions.took, session, self._position, self.call_id, agent.digest)
        if session.recent is not None:
            repeats_of(session.recent, agent.digest).last = found
        return found

    # -- the end

    def _finish(self, error: OSError | None) -> None:
        """The record is committed: let the agent have the rest."""
        try:
            self._write_rest(error)
        except Exception as e:
            self.broke(e)

    def _write_rest(self, error: OSError | None) -> None:
        agent, engine = self.agent, self.engine
        conn, captured, record = agent.conn, self._captured, self._stored
        if error is not None:
            self._unrecord()
        answer = None if error is not None else self._answer()
        if conn is None or captured is None or record is None:
            if answer is not None:
                answer.lost(sure=True)
            self._end(State.ABANDONED)
            return
        if error is not None:
            if agent.begun:
                self._end(State.FAILED)
                conn.transport.abort()
            else:
                why = "the gateway could not store this call; try again"
                self._end(State.FAILED, RequestError(why, kind="overloaded"))
            return
        broken = agent.broken(captured, engine)
        spare: int | None = None
        try:
            if broken is not None and not agent.begun:
                raise broken
            if agent.stream:
                rest = agent.end(record, engine) if broken is None else agent.error_event(broken)
                spare = dedup.behind_the_end(rest)
                conn.write(agent.begin(rest, engine) + LAST_CHUNK)
            else:
                agent.write_whole(conn, record, captured, engine)
        except Exception as e:  # nothing of the end is written
            if broken is None and answer is not None:
                answer.lost(sure=True)
            if not isinstance(e, RequestError | UpstreamError):
                raise
            self._end(State.FAILED, e if isinstance(e, RequestError) else RequestError(str(e), kind="upstream"))
            return
        if broken is None and answer is not None:
            conn.carries(answer, spare)
        self._end(State.ANSWERED if broken is None else State.FAILED)

    def _unrecord(self) -> None:
        """The store lost this call's record: nothing may refer to it."""
        self._context.counters["store_failures"] += 1
        session = self.session
        if self._stored is not None and self._stored.status in TURNS:
            session.turns -= 1
            session.started_turns -= 1
            session.errors += 1
            self._context.sessions.turns -= 1

    def _end(
        self, state: State, error: RequestError | None = None, headers: tuple[tuple[bytes, bytes], ...] | None = None
    ) -> None:
        """Leave every list; answer with `error` if the agent still waits for one."""
        if self.ended:
            return
        self.become(state)
        self.session.inflight.discard(self)
        self._context.running.discard(self)
        engine, transport = self.engine, self._transport
        self._transport = None  # which holds this call
        if transport is not None:
            transport.close()
        engine.release()
        if error is not None:
            self.agent.fail(error, headers)
        else:
            self.agent.done()
        engine.incoming.parts = []
        self.agent.close()
        self._stored = None

    # -- the agent's connection

    def agent_gone(self) -> None:
        """The agent hung up: cancel the call at the engine."""
        self.agent.conn = None
        if self.ended or self._captured is not None:
            return
        self._stop()
        self._record_failure(ABORTED, 499, "agent_gone", "the agent closed the connection before the reply was whole")
        self._end(State.ABANDONED)

    def agent_slow(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def agent_ready(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def comment(self, text: bytes) -> bool:
        """Write a comment line to an agent that waits for a stream. False: none waits any more."""
        if self.ended or self._captured is not None:
            return False
        return self.agent.comment(text, self.engine)

    def take_over(self, conn: AgentConnection, keep_alive: bool) -> None:
        """Go on answering on another connection: the agent gave up on the first one and asked again."""
        conn.call = self
        self.agent_ready()
        self.agent.move(conn, keep_alive, self.engine)  # which may pause the engine again
