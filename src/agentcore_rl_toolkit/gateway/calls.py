"""One model call, from the agent's request to the record in the journal.

The states of a call, in order (any of them may end in `_fail` or `agent_gone`)::

    held        the gateway is paused and lets calls wait
    routed      a server is chosen; a connection to it is free or being opened
    sent        the request is with the server; nothing has come back
    relaying    the first body bytes of a good stream have gone to the agent: from here on there is no second try
    recorded    the reply is whole and appended to the journal; its last bytes are still ours
    done        the agent has the last byte

Replies that are not streamed are kept until `recorded`, so a server that dies in the middle of one costs a retry and
not a broken reply. Of a stream everything is relayed at once except its end: from the event that carries the finish
reason on, bytes wait for the append.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ..errors import CaptureError
from . import journal as journals
from .capture import Captured, read_reply, read_stream
from .dialects.errors import RequestError, error_body
from .engine_errors import upstream_error
from .recording import build, stream_again, whole_again
from .records import ABORTED, ERROR, INVALID, OK, PARTIAL, UNTRAINABLE, CallRecord, decode, encode
from .wire import LAST_CHUNK, Request, error_reply, passed, reply, stream_head

if TYPE_CHECKING:
    from .listener import AgentConnection
    from .routing import Worker
    from .server import Gateway
    from .sessions import Session
    from .upstream import UpstreamConnection

Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(Fields)
_to_json = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")
_ONE = msgspec.Raw(b"1")
_NULL = b"null"
_FINISH = b'"finish_reason":"'
_DONE = b"data: [DONE]"

MAX_TRIES = 4
_REMEMBERED = 8  # answered calls per session that a repeated request may be joined to
_TRY_ELSEWHERE = frozenset({429, 502, 503, 504})


class Answered:
    """A recorded call that may be asked for again: where its record is, and whether its reply was written out."""

    __slots__ = ("delivered", "finished", "length", "position")

    def __init__(self, position: int, length: int, delivered: bool, finished: float) -> None:
        self.position = position
        self.length = length
        self.delivered = delivered
        self.finished = finished


class Call:
    """One model call of a session. It is the `Reader` of its upstream connection."""

    __slots__ = (
        "body",
        "call_id",
        "call_off",
        "captured",
        "carry",
        "conn",
        "deadline",
        "dialect",
        "digest",
        "ended",
        "engine",
        "fields",
        "first_token_s",
        "gateway",
        "headers",
        "held",
        "index",
        "keep_alive",
        "length",
        "n",
        "parts",
        "path",
        "position",
        "received",
        "relaying",
        "retry_of",
        "session",
        "started_s",
        "status",
        "stream",
        "tried",
        "up",
        "upstream_id",
        "version",
        "worker",
    )

    def __init__(self, gateway: Gateway, conn: AgentConnection, session: Session, dialect: str) -> None:
        self.gateway = gateway
        self.conn: AgentConnection | None = conn
        self.session = session
        self.dialect = dialect
        self.call_id = ""
        self.index = -1
        self.started_s = time.time()
        self.first_token_s: float | None = None
        self.stream = False
        self.n = 1
        self.fields: Fields = {}
        self.body = b""
        self.path = b""
        self.digest = 0
        self.retry_of: str | None = None
        self.keep_alive = True
        self.worker: Worker | None = None
        self.up: UpstreamConnection | None = None
        self.call_off: Callable[[], None] | None = None
        self.tried: tuple[Worker, ...] = ()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.received = 0
        self.held: list[bytes] | None = None
        self.carry = b""
        self.engine = "openai"
        self.upstream_id: str | None = None
        self.position = -1
        self.length = 0
        self.relaying = False
        self.captured: Captured | None = None
        self.version: int | None = None
        self.deadline: float | None = None
        self.ended = False

    # -- beginning

    def begin(self, request: Request, path: bytes) -> None:
        """Check the request, put in what the capture and the session want, and send it on."""
        session, gateway = self.session, self.gateway
        self.keep_alive = request.keep_alive
        try:
            fields = _fields.decode(request.body)
        except (msgspec.DecodeError, RecursionError) as e:
            self.refuse(RequestError(f"the request body must be a JSON object: {e}"))
            return
        self.digest = hash(request.body)
        stream = fields.get("stream")
        self.stream = stream is not None and bytes(stream) == b"true"
        try:
            fields = self._read(request.body, fields)
            self._hold_to_settings(fields)
        except RequestError as e:
            self.refuse(e)
            return
        idempotency_key = request.headers.get(b"idempotency-key")
        if idempotency_key is not None:
            self.digest = hash((idempotency_key, self.digest))
        again = idempotency_key is not None or request.headers.get(b"x-stainless-retry-count", b"0") != b"0"
        if self._joins(again):
            return
        self.fields = dict(fields)
        self._compose(fields, path)
        self.call_id = next(gateway.call_ids)
        self.index = session.next_index
        session.next_index += 1
        session.started_turns += 1
        session.inflight.add(self)
        if self.conn is not None:
            self.conn.call = self
        limit = gateway.limits.call_s
        self.deadline = None if limit is None else time.monotonic() + limit
        gateway.running.add(self)
        self._start()

    def _read(self, body: bytes, fields: Fields) -> Fields:
        """Understand the request; the fields as the engine takes them. Raises: RequestError."""
        n = fields.get("n")
        if n is not None:
            text = bytes(n)
            self.n = int(text) if text.isdigit() else 1
        return fields

    def _compose(self, fields: Fields, path: bytes) -> None:
        """Write the engine's request, asking for the tokens whatever the agent asked for."""
        if path == b"completions":
            if "logprobs" not in fields or bytes(fields["logprobs"]) in (_NULL, b"0"):
                fields["logprobs"] = _ONE
        else:
            fields["logprobs"] = _TRUE
        fields["return_token_ids"] = _TRUE
        self.body = _to_json(fields)
        self.path = b"/v1/" + path

    def _start(self) -> None:
        """Everything is ready: off to an engine, unless the gateway is paused."""
        if self.gateway.paused is not None:
            self.gateway.hold(self)
        else:
            self.route()

    def _hold_to_settings(self, fields: Fields) -> None:
        session = self.session
        settings = session.settings
        if settings.max_turns is not None and session.started_turns >= settings.max_turns:
            raise RequestError(
                f"this session may make {settings.max_turns} model calls, all are used", kind="turn_limit"
            )
        if settings.allowed_models is not None:
            model = fields.get("model")
            name = msgspec.json.decode(model) if model is not None else None
            if name not in settings.allowed_models:
                allowed = ", ".join(settings.allowed_models)
                raise RequestError(
                    f"model {name!r} is not open to this session (allowed: {allowed})",
                    kind="model_not_found",
                    param="model",
                )
        if settings.model_id is not None:
            fields["model"] = msgspec.Raw(_to_json(settings.model_id))
        for key, value in session.overrides.items():
            if key == "max_tokens" and "max_completion_tokens" in fields:
                del fields["max_completion_tokens"]
            fields[key] = msgspec.Raw(value)
        if settings.max_tokens is not None:
            for key in ("max_tokens", "max_completion_tokens"):
                if key in fields:
                    text = bytes(fields[key])
                    if not text.isdigit() or int(text) > settings.max_tokens:
                        fields[key] = msgspec.Raw(b"%d" % settings.max_tokens)
            if "max_tokens" not in fields and "max_completion_tokens" not in fields:
                fields["max_tokens"] = msgspec.Raw(b"%d" % settings.max_tokens)

    def _joins(self, again: bool) -> bool:
        """Whether this is a request of before, sent once more; then it gets the first one's reply and is not recorded.

        It is one when the client says so (a retry count, an idempotency key), or when the first one's reply could not
        be delivered. The same body alone proves nothing: agents sample the same prompt several times on purpose.
        """
        conn = self.conn
        session = self.session
        if conn is None:
            return False
        recent = session.recent
        if again:
            for other in session.inflight:
                if other.digest == self.digest and other.dialect == self.dialect and other.stream == self.stream:
                    self.conn, self.ended = None, True
                    self.gateway.counters["turns_joined"] += 1
                    other.take_over(conn, self.keep_alive)
                    return True
        known = recent.get(self.digest) if recent else None
        if known is None or (known.delivered and not again):
            return False
        if time.monotonic() - known.finished > self.gateway.limits.retry_memory_s:
            return False
        record = decode(self.gateway.journal.read(known.position, known.length))
        self.gateway.counters["turns_joined"] += 1
        known.delivered = True
        self.conn, self.ended = None, True
        body = self._replayed(record)
        if self.stream:
            event_stream = ((b"content-type", b"text/event-stream"),)
            conn.write(stream_head(200, event_stream, keep_alive=self.keep_alive) + chunk(body) + LAST_CHUNK)
        else:
            conn.write(reply(200, body, keep_alive=self.keep_alive))
        conn.done(keep_alive=self.keep_alive)
        return True

    def _replayed(self, record: CallRecord) -> bytes:
        return stream_again(record) if self.stream else whole_again(record)

    def take_over(self, conn: AgentConnection, keep_alive: bool) -> None:
        """Go on answering on another connection: the agent gave up on the first one and asked again."""
        old, self.conn = self.conn, conn
        conn.call = self
        self.keep_alive = keep_alive
        if old is not None:
            old.call = None
            old.transport.abort()
        if self.relaying:
            conn.write(stream_head(200, self._stream_headers(), keep_alive=keep_alive) + chunk(self._sent()))
        self.agent_ready()

    def _sent(self) -> bytes:
        """What of the stream has gone to the agent."""
        unsent = len(self.carry) + (sum(map(len, self.held)) if self.held is not None else 0)
        return b"".join(self.parts)[: self.received - unsent]

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return passed(self.headers)

    # -- upstream

    def route(self) -> None:
        """Choose a server and send the request to it."""
        session, gateway = self.session, self.gateway
        worker = gateway.router.pick(session.worker, self.tried)
        if worker is None:
            if self.tried:
                self._fail(RequestError("no inference server answered; see the gateway's log", kind="upstream"))
            else:
                self._fail(
                    RequestError(
                        "the gateway has no inference server; add one with POST /admin/workers", kind="overloaded"
                    )
                )
            return
        session.worker = self.worker = worker
        worker.inflight += 1
        worker.calls += 1
        self.engine, self.upstream_id = worker.config.engine, worker.id
        self.version = gateway.weight_version
        connection = worker.pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self.call_off = worker.pool.connect(self._connected)

    def _connected(self, connection: UpstreamConnection | None, error: OSError | None) -> None:
        self.call_off = None
        if connection is not None:
            self._send(connection)
            return
        worker = self._leave()
        if worker is not None:
            worker.failed(time.monotonic(), unreachable=True)
            self._again(worker, f"inference server {worker.config.url} cannot be reached: {error}")

    def _send(self, connection: UpstreamConnection) -> None:
        worker = self.worker
        if worker is None:  # pragma: no cover  (a connection is only asked for with a worker)
            return
        self.up = connection
        self.status = 0
        connection.send(self, self.gateway.head(worker, self.path, len(self.body)) + self.body)

    def _leave(self) -> Worker | None:
        """Let go of the server; returns it."""
        worker, self.worker = self.worker, None
        self.up = None
        if worker is not None:
            worker.inflight -= 1
        return worker

    def _again(self, worker: Worker, why: str) -> None:
        """Try another server, or this one if there is no other, as long as nothing has reached the agent."""
        self.tried = (*self.tried, worker)
        if self.relaying:
            self._break_off(why)
            return
        self.parts, self.received, self.held, self.first_token_s = [], 0, None, None
        if len(self.tried) < MAX_TRIES and self.gateway.router.pick(None, self.tried) is not None:
            self.gateway.counters["retries"] += 1
            self.route()
            return
        self._fail(RequestError(why, kind="upstream"))

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers

    def on_data(self, pieces: list[bytes]) -> None:
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.received += len(data)
        if self.stream and self.status == 200:
            if self.first_token_s is None:
                self.first_token_s = time.time()
            self.parts += pieces
            self._relay(data)
        else:
            self.parts.append(data)
        if self.received > self.gateway.limits.reply_bytes:
            self._stop_upstream()
            self._again_never(f"the inference server's reply is larger than {self.gateway.limits.reply_bytes} bytes")

    def _relay(self, data: bytes) -> None:
        conn = self.conn
        if conn is None:
            return
        if self.held is not None:
            self.held.append(data)
            return
        if self.carry:
            data, self.carry = self.carry + data, b""
        size = len(data)
        end = -1
        if self.n == 1:
            end = data.find(_FINISH)
        if end < 0:
            end = data.find(_DONE)
        if end >= 0:
            # Whoever reads the finish reason takes the reply for whole, so it must be in the journal by then.
            cut = data.rfind(b"\n\n", 0, end) + 2
            if cut == 1:
                cut = 0
            self.held = [data[cut:]]
            data, size = data[:cut], cut
        elif data[-2:] != b"\n\n" and data[-4:] != b"\r\n\r\n":
            # The event goes on in the next read; it is of no use to the agent before that.
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            size = cut if cut >= 4 else 0
            self.carry, data = data[size:], data[:size]
        if size:
            if not self.relaying:
                self.relaying = True
                conn.write(
                    stream_head(200, passed(self.headers), keep_alive=self.keep_alive) + b"%x\r\n%b\r\n" % (size, data)
                )
            else:
                conn.write(b"%x\r\n%b\r\n" % (size, data))

    def may_read(self) -> bool:
        return self.conn is None or self.conn.paused_since is None

    def on_lost(self, error: Exception | None, *, reused: bool, began: bool) -> None:
        worker = self._leave()
        if worker is None:
            return
        if reused and not began:
            # The server closed an idle connection at the moment we used it: nobody's fault, and it did not see the
            # request.
            self.gateway.counters["stale_connections"] += 1
            if self.session.worker is worker and not worker.draining:
                self.route()
                return
        worker.failed(time.monotonic(), unreachable=True)
        self._again(worker, f"inference server {worker.config.url} closed the connection before its reply was whole")

    def on_complete(self) -> None:
        worker = self._leave()
        if worker is None:
            return
        status = self.status
        if status == 200:
            worker.succeeded()
            self._record()
            return
        body = self._body()
        if status >= 500:
            worker.failed(time.monotonic(), unreachable=False)
        if (
            status in _TRY_ELSEWHERE
            and len(self.tried) + 1 < MAX_TRIES
            and self.gateway.router.pick(None, (*self.tried, worker)) is not None
        ):
            self._again(worker, "")
            return
        self._pass_error(status, body)

    # -- ending

    def _record(self, *, only_whole: bool = False) -> bool:
        try:
            captured = self._capture()
        except CaptureError as e:
            captured = Captured(choices=[], complete=True, problem=str(e))
        if only_whole and (len(captured.choices) < self.n or not captured.complete):
            return False
        self.captured = captured
        if captured.error is not None or not captured.complete:
            status = PARTIAL
        elif captured.problem is not None:
            status = INVALID
        elif captured.has_tokens:
            status = OK
        elif self.engine != "openai":
            status = INVALID
            captured.problem = (
                "the engine returned no token ids; it must honour return_token_ids (vLLM does since 0.10.2)"
            )
        else:
            status = UNTRAINABLE
        self._append(status, captured)
        return True

    def _capture(self) -> Captured:
        """What the reply says. Raises: CaptureError."""
        return read_stream(self.parts) if self.stream else read_reply(self._body())

    def _body(self) -> bytes:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def _append(self, status: str, captured: Captured) -> None:
        record = build(self, status, captured)
        session = self.session
        if status in (OK, UNTRAINABLE):
            session.turns += 1
            self.gateway.sessions.turns += 1
        else:
            session.errors += 1
            session.started_turns -= 1
            self.gateway.counters["turns_" + status] += 1
        if session.closed:
            self._finish(None)
            return
        position, length = self.gateway.journal.append(journals.CALL, session.id_bytes, encode(record), self._finish)
        self.position, self.length = position, length
        session.positions.append(position)
        session.lengths.append(length)

    def _finish(self, error: OSError | None) -> None:
        """The record is with the operating system: let the agent have the rest."""
        conn = self.conn
        if error is not None:
            self._unrecord()
        else:
            self._remember(delivered=conn is not None)
        if conn is None or self.ended:
            self._end()
            return
        if error is not None and not self.relaying:
            self._end(RequestError("the gateway could not store this call; try again", kind="overloaded"))
            return
        if error is not None:
            self._end()
            conn.transport.abort()
            return
        try:
            if self.stream:
                rest = self._stream_end()
                tail = chunk(rest) + LAST_CHUNK
                if not self.relaying:
                    tail = stream_head(200, self._stream_headers(), keep_alive=self.keep_alive) + tail
                conn.write(tail)
            else:
                conn.write(self._whole())
        except RequestError as e:
            self._end(e)
            return
        self._end()

    def _stream_end(self) -> bytes:
        """What of the stream the agent has not got yet."""
        return b"".join(self.held) if self.held is not None else self.carry

    def _whole(self) -> bytes:
        """The reply to a call that was not streamed."""
        content_type = b"application/json"
        extra = []
        for pair in passed(self.headers):
            if pair[0] == b"content-type":
                content_type = pair[1]
            else:
                extra.append(pair)
        return reply(200, self._body(), content_type=content_type, headers=extra, keep_alive=self.keep_alive)

    def _remember(self, *, delivered: bool) -> None:
        """Let a repetition of this request find its record; only the last few of a session are kept."""
        recent = self.session.recent
        if recent is None or self.captured is None or self.captured.problem is not None or not self.captured.complete:
            return
        recent[self.digest] = Answered(self.position, self.length, delivered, time.monotonic())
        recent.move_to_end(self.digest)
        if len(recent) > _REMEMBERED:
            recent.popitem(last=False)

    def _unrecord(self) -> None:
        """The journal lost this call's frame: nothing may refer to it."""
        session = self.session
        self.gateway.counters["store_failures"] += 1
        session.lose(self.position)

    def _end(self, error: RequestError | None = None) -> None:
        """Leave every list; answer with `error` if the agent still waits for one."""
        if self.ended:
            return
        self.ended = True
        self.session.inflight.discard(self)
        gateway = self.gateway
        gateway.running.discard(self)
        conn, self.conn = self.conn, None
        self.parts, self.held, self.fields, self.body = [], None, {}, b""
        if conn is not None:
            if error is not None:
                headers: tuple[tuple[bytes, bytes], ...] = ()
                if error.kind in ("overloaded", "upstream"):
                    headers = ((b"retry-after", b"1"),)
                conn.write(error_reply(self.dialect, error, headers=headers, keep_alive=self.keep_alive))
            conn.done(keep_alive=self.keep_alive)
        for changed in gateway.call_ended:
            changed.set()

    def refuse(self, error: RequestError) -> None:
        """A request that never became a call: answered, counted, not recorded."""
        self.gateway.counters["refused"] += 1
        conn, self.conn = self.conn, None
        self.ended = True
        if conn is not None:
            conn.write(error_reply(self.dialect, error, keep_alive=self.keep_alive))
            conn.done(keep_alive=self.keep_alive)

    def _note(self, status: str, http_status: int, kind: str, message: str) -> None:
        """Keep a failed call as an event of the session, never as a turn."""
        session = self.session
        session.started_turns -= 1
        session.errors += 1
        self.gateway.counters["turns_" + status] += 1
        if session.closed:
            return
        if session.recent is not None:
            session.recent.pop(self.digest, None)  # a repetition of this one is no repetition of an earlier success
        captured = Captured(choices=[])
        record = build(self, status, captured)
        record.http_status, record.error_type, record.error = http_status, kind, message[:4000]
        position, length = self.gateway.journal.append(journals.CALL, session.id_bytes, encode(record))
        session.positions.append(position)
        session.lengths.append(length)

    def _fail(self, error: RequestError) -> None:
        self._note(ERROR, error.status or 500, error.kind, str(error))
        self._end(error)

    def _pass_error(self, status: int, body: bytes) -> None:
        """Give the engine's own error to the agent, in the dialect's shape, with its status."""
        error = upstream_error(status, body)
        self._note(ERROR, status, error.code or error.kind, str(error))
        conn = self.conn
        if conn is not None:
            extra = tuple(pair for pair in passed(self.headers) if pair[0] != b"content-type")
            conn.write(error_reply(self.dialect, error, headers=extra, keep_alive=self.keep_alive))
        self._end()

    def _again_never(self, why: str) -> None:
        if self.relaying:
            self._break_off(why)
        else:
            self._fail(RequestError(why, kind="upstream"))

    def _break_off(self, why: str) -> None:
        """End a stream that cannot be finished, with an error event and without the last chunk."""
        self._note(PARTIAL, self.status, "upstream", why)
        conn, self.conn = self.conn, None
        self._end()
        if conn is not None:
            conn.write(chunk(self._error_event(RequestError(why, kind="upstream"))))
            conn.call = None
            conn.transport.close()

    def _error_event(self, error: RequestError) -> bytes:
        return b"data: " + error_body(self.dialect, error) + b"\n\n"

    def _stop_upstream(self) -> None:
        up = self.up
        call_off, self.call_off = self.call_off, None
        self._leave()
        if call_off is not None:
            call_off()
        if up is not None:
            up.abort()

    def abort(self, error: RequestError) -> None:
        """Stop the call from our side (deadline, closed session, weight sync) and tell the agent why."""
        if self.ended:
            return
        self._stop_upstream()
        if self.relaying:
            self._break_off(str(error))
        else:
            self._fail(error)

    # -- the agent's side of the connection

    def agent_gone(self) -> None:
        """The agent hung up: cancel the call at the engine."""
        self.conn = None
        if self.ended or self.captured is not None:
            return
        self._stop_upstream()
        # Several choices end at different times, so their finish reasons are not held back: the agent may have all of
        # them, and then it has seen a whole reply.
        if self.n > 1 and self.relaying and self._record(only_whole=True):
            return
        self._note(ABORTED, 499, "agent_gone", "the agent closed the connection before the reply was whole")
        self._end()

    def agent_slow(self) -> None:
        if self.up is not None:
            self.up.transport.pause_reading()

    def agent_ready(self) -> None:
        if self.up is not None:
            self.up.transport.resume_reading()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
