"""The agent side of a call: its connection, its request, and how the reply is written to it.

Two classes: `RelayingAgent` speaks the servers' dialect and gets their bytes as they come; `TranslatingAgent` speaks another
one, and replies are translated for it. Both hold back the end of a stream, from the event with the finish reason on: an agent
that reads this event takes the reply for whole, so the record must be in the store by then.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from ...errors import UpstreamError
from ...messages.dialects import DIALECTS, Delta, Dialect, ModelRequest, RequestError, StreamEncoder
from ...messages.dialects.canonical import new_id
from ...messages.dialects.fields import read_body
from ...messages.dialects.passthrough import Fields
from ...messages.dialects.responses import Recorded
from ...messages.dialects.surrogates import HALF_SURROGATE
from ...messages.errors import error_body
from ..capture.asked import LEFT_OUT, wants_logprobs, wants_numbers
from ..capture.events import DONE, gather
from ..capture.prefix_index import Prefixes
from ..capture.record import CallRecord, Captured
from ..capture.replay import replay
from ..capture.reply import Event
from ..capture.stream import StreamReader
from ..engines.errors import event_error
from ..http.connection import AgentConnection
from ..http.messages import (
    JOINED_BYTES,
    JSON,
    Request,
    chunk,
    error_reply,
    passed,
    reply,
    reply_head,
    retry_after,
    stream_head,
)
from ..sessions.session import Session
from .engine import EngineSide
from .incremental import LISTS, LONG, LongRequest, decoded, digest_of_body, translate, understand

PING_S = 10.0  # an agent hears this often that its stream goes on: a call that the engine writes for minutes comes at its end
_ERROR_EVENT = (b'data: {"error"', b'data:{"error"', b"event: error")
_PLAIN = [(b"content-type", b"application/json")]
_PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_to_json = msgspec.json.Encoder().encode


class AgentSide(ABC):
    """The agent's side of one call. ``begun``: the head of a streamed reply has been written. ``held`` is the end of a
    stream, once it has come. ``long`` is what `fields` lack, when the request is a long one. ``numbers``: the agent gets
    the token ids and logprobs that the engine is asked for.
    """

    def __init__(self, conn: AgentConnection, dialect: str) -> None:
        self.conn: AgentConnection | None = conn
        self.dialect = dialect
        self.keep_alive = True
        self.fields: Fields = {}
        self.long: LongRequest | None = None
        self.digest = 0
        self.stream = False
        self.n = 1
        self.numbers = True
        self.begun = False
        self.held: list[bytes] | None = None
        self.written: list[bytes] = []  # of a stream
        self.finished: set[int] | None = None  # of several choices, those whose finish reason has been met
        self.left_out: Counter[str] = Counter()  # by kind: parts of the history that the model does not get as sent

    # -- the request

    def receive(self, request: Request, session: Session) -> bytes:
        """Decode a request; what had to be decoded of its body. Raises: RequestError."""
        self.keep_alive = request.keep_alive
        body, halves = read_body(request.body, lambda body: self._read(body, session))
        if halves:
            self.left_out[HALF_SURROGATE] = halves
        stream = self.fields.get("stream")
        self.stream = stream is not None and bytes(stream) == b"true"
        if self.stream and self.conn is not None and self.conn.reader.http10():
            raise RequestError("a streamed reply needs HTTP/1.1", param="stream")
        return body

    def _read(self, body: bytes, session: Session) -> bytes:
        long = self._long(body, session) if len(body) >= LONG else None
        if long is None:
            self.fields, self.digest = decoded(body), digest_of_body(body)
            return body
        self.long, self.fields, self.digest = long, long.fields, long.digest()
        return long.read

    def settle(self, fields: Fields) -> None:
        """This is the request, as the session's settings make it and as it is recorded."""
        self.fields = dict(fields)
        self.numbers = wants_numbers(fields)
        if self.left_out:
            self.fields[LEFT_OUT] = msgspec.Raw(_to_json(self.left_out))

    @abstractmethod
    def _long(self, body: bytes, session: Session) -> LongRequest | None:
        """A long request in two parts. Raises: msgspec.DecodeError, RecursionError when it is not a JSON object."""

    # -- the reply

    @abstractmethod
    def take(self, data: bytes, engine: EngineSide) -> None:
        """Bytes of a good stream have come. Raises: CaptureError, UpstreamError, when it cannot go on."""

    def met(self, ended: Iterable[int]) -> bool:
        """These choices end now. Returns whether none is left."""
        if self.finished is None:
            self.finished = set()
        self.finished.update(ended)
        return len(self.finished) >= self.n

    def begin(self, data: bytes, engine: EngineSide) -> bytes:
        """A chunk of a stream, behind the stream's head if that is not written yet."""
        self.written.append(data)
        if self.begun:
            return chunk(data)
        self.begun = True
        return stream_head(200, self.headers(engine), keep_alive=self.keep_alive) + chunk(data)

    @abstractmethod
    def headers(self, engine: EngineSide) -> list[tuple[bytes, bytes]]:
        """Those of a stream's head."""

    @abstractmethod
    def broken(self, captured: Captured, engine: EngineSide) -> RequestError | None:
        """Why the agent must not take its reply for whole, when it would."""

    @abstractmethod
    def end(self, record: CallRecord, engine: EngineSide) -> bytes:
        """The part of a stream that has not been written yet."""

    @abstractmethod
    def write_whole(self, conn: AgentConnection, record: CallRecord, captured: Captured, engine: EngineSide) -> None:
        """Answer a call that is not streamed. Raises: RequestError."""

    @abstractmethod
    def replayed(self, record: CallRecord) -> bytes:
        """The reply that a recorded call got, for a repeated request."""

    def forget(self) -> None:
        """Another reply comes; nothing of this one has reached the agent."""
        self.held = self.finished = None

    def error_event(self, error: RequestError) -> bytes:
        return b"data: " + error_body(self.dialect, error) + b"\n\n"

    def fail(self, error: RequestError, headers: tuple[tuple[bytes, bytes], ...] | None = None) -> None:
        """Answer with an error; a stream that has begun ends with it, and without the last chunk."""
        conn, self.conn = self.conn, None
        if conn is None:
            return
        if self.begun:
            conn.write(chunk(self.error_event(error)))
            conn.call = None
            conn.transport.close()
            return
        headers = retry_after(error) if headers is None else headers
        conn.write(error_reply(self.dialect, error, headers=headers, keep_alive=self.keep_alive))
        conn.done(keep_alive=self.keep_alive)

    def done(self) -> None:
        """The reply is written in full."""
        conn, self.conn = self.conn, None
        if conn is not None:
            conn.done(keep_alive=self.keep_alive)

    def close(self) -> None:
        """The call has ended."""
        self.held, self.fields, self.long, self.written = None, {}, None, []

    # -- the connection

    def comment(self, text: bytes, engine: EngineSide) -> bool:
        """Write a comment line, which keeps the connection of a stream alive. False: the agent has gone away."""
        if self.conn is None:
            return False
        self.conn.write(self.begin(text, engine))
        return True

    def move(self, conn: AgentConnection, keep_alive: bool, engine: EngineSide) -> None:
        """Go on answering on another connection: the agent gave up on the first one and asked again."""
        old, self.conn = self.conn, conn
        self.keep_alive = keep_alive
        if old is not None:
            old.call = None
            old.transport.abort()
        self.begun = False
        sent, self.written = b"".join(self.written), []
        if sent:
            conn.write(self.begin(sent, engine))


class RelayingAgent(AgentSide):
    """An agent that speaks the dialect of the servers."""

    def __init__(self, conn: AgentConnection, dialect: str) -> None:
        super().__init__(conn, dialect)
        self.reader: StreamReader | None = None  # of a stream that has begun
        self.carry: list[bytes] = []  # of an event that is not whole yet
        self.ended = False  # whether it has said why it ends

    def _long(self, body: bytes, session: Session) -> LongRequest | None:
        return understand(body, session.texts.messages)

    def take(self, data: bytes, engine: EngineSide) -> None:
        conn = self.conn
        if conn is None:
            return
        data = gather(self.carry, data)
        if not data:
            return
        if self.reader is None:
            self.reader = StreamReader(entries=wants_logprobs(self.fields))
            if data.startswith(_ERROR_EVENT):
                self.held = []  # it can still be answered with a true status
        out: list[bytes] = []
        plain = not self.numbers and engine.incoming.kind != "openai"  # the agent did not ask for the numbers
        for lines, said, event in self.reader.read(data, plain=plain):
            if event is None and said not in (None, DONE) and said.lstrip()[:1] != b"{":
                raise UpstreamError("the inference server sent something else in the middle of its reply")
            if self.held is None and (said == DONE or (event is not None and self._ends(event))):
                self.held = []
            (out if self.held is None else self.held).append(lines)
        if out:
            conn.write(self.begin(_joined(out), engine))

    def _ends(self, event: Event) -> bool:
        """Whether the last of its choices ends with this event."""
        for choice in event.choices:
            if choice.finish_reason is not None:
                self.ended = True
                if self.n == 1 or self.met([choice.index]):
                    return True
        return False

    def headers(self, engine: EngineSide) -> list[tuple[bytes, bytes]]:
        return passed(engine.incoming.headers)

    def broken(self, captured: Captured, engine: EngineSide) -> RequestError | None:
        if captured.error is not None:
            seen = self.begun or (not self.stream and captured.choices)
            return None if seen else event_error(captured.error)
        if not self.stream:
            if captured.choices:
                return None
            why = captured.problem or "it has no choices"
            return RequestError(f"the inference server answered 200 with no reply: {why}", kind="upstream")
        if captured.complete and captured.choices:
            return None
        textual = engine.incoming.kind == "openai" and captured.problem is not None
        if textual and self.ended:
            return None  # the agent may understand such an endpoint although nothing can be recorded of it
        return RequestError("the inference server ended its reply before it was whole", kind="upstream")

    def end(self, record: CallRecord, engine: EngineSide) -> bytes:
        return _joined(self.held or []) + b"".join(self.carry)

    def write_whole(self, conn: AgentConnection, record: CallRecord, captured: Captured, engine: EngineSide) -> None:
        body = engine.incoming.body()
        if not self.numbers:
            body = captured.plain or body
        headers = passed(engine.incoming.headers)
        if headers == _PLAIN and self.keep_alive:
            head = _PLAIN_HEAD % len(body)
        else:
            content_type = next((value for name, value in headers if name == b"content-type"), JSON)
            extra = [pair for pair in headers if pair[0] != b"content-type"]
            head = reply_head(200, len(body), content_type=content_type, headers=extra, keep_alive=self.keep_alive)
        if len(body) < JOINED_BYTES:
            conn.write(head + body)
        else:
            conn.transport.writelines((head, body))

    def replayed(self, record: CallRecord) -> bytes:
        options = self.fields.get("stream_options")
        usage = options is not None and b"true" in bytes(options)
        asked = ModelRequest(dialect="chat", model="", stream=self.stream, include_usage=usage, logprobs=True)
        return replay(DIALECTS[self.dialect], asked, record)

    def forget(self) -> None:
        super().forget()
        self.reader, self.carry, self.ended = None, [], False


def _joined(events: list[bytes]) -> bytes:
    """Events, from the lines of each."""
    return b"\n\n".join([*events, b""])


class TranslatingAgent(AgentSide):
    """An agent that is answered in its dialect's own words, written from deltas."""

    def __init__(self, conn: AgentConnection, dialect: str) -> None:
        super().__init__(conn, dialect)
        self.speaks: Dialect = DIALECTS[dialect]
        self.asked = ModelRequest(dialect=self.speaks.name, model="")
        self.encoder: StreamEncoder | None = None
        self.reply_id = ""
        self._wrote_s = 0.0

    def _long(self, body: bytes, session: Session) -> LongRequest | None:
        name = LISTS.get(self.speaks.name)
        return None if name is None else understand(body, session.texts.translated, name)

    def understand(
        self,
        body: bytes,
        known: Prefixes,
        as_sent: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        allowed: Collection[str],
        recorded: Recorded,
    ) -> None:
        """Read what is asked for. ``as_sent`` gives messages the form in which the server, and the record, has them. Fields that
        nothing here reads go to the engine if they are ``allowed``, and are left out else.

        Raises: RequestError.
        """
        request, self.long = self.long, None
        speaks = self.speaks.with_recorded(recorded)
        if request is None:
            self.asked = speaks.parse_request(body)
        else:
            self.asked, self.long = translate(request, known, speaks, as_sent)
        self.left_out += Counter(self.asked.left_out)
        self.n, self.reply_id, asked = self.asked.n, new_id("chatcmpl-"), self.asked
        asked.sampling.other |= {name: value for name, value in asked.unknown.items() if name in allowed}

    def as_chat(self, as_sent: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Fields:
        """The request as a chat completion, without its messages if they are in `long`."""
        body = self.asked.to_chat_body()
        if self.long is not None:
            del body["messages"]
        else:
            body["messages"] = as_sent(body["messages"])
        return {name: msgspec.Raw(_to_json(value)) for name, value in body.items()}

    def take(self, data: bytes, engine: EngineSide) -> None:
        deltas, now_s = engine.feed(data), time.monotonic()
        self._wrote_s = self._wrote_s or now_s
        if deltas or now_s - self._wrote_s > PING_S:
            self._write(deltas, engine, now_s)

    def _write(self, deltas: list[Delta], engine: EngineSide, now_s: float) -> None:
        """Write deltas; from the finish reason on they wait for the record."""
        encoder = self.encoder
        out: list[bytes] = []
        if encoder is None:
            encoder = self.encoder = self._encoder()
            out.append(encoder.start())
        for delta in deltas:
            if self.held is None and delta.finish_reason is not None and (self.n == 1 or self.met([delta.choice])):
                self.held = []
            (out if self.held is None else self.held).append(encoder.feed(delta))
        data = b"".join(out)
        if not data and self.held is None and now_s - self._wrote_s > PING_S:
            data = encoder.ping()
        if data and self.conn is not None:
            self._wrote_s = now_s
            self.conn.write(self.begin(data, engine))

    def _encoder(self) -> StreamEncoder:
        return self.speaks.encoder(self.asked, reply_id=self.reply_id, model=self.asked.model)

    def headers(self, engine: EngineSide) -> list[tuple[bytes, bytes]]:
        return _EVENT_STREAM

    def broken(self, captured: Captured, engine: EngineSide) -> RequestError | None:
        if captured.error is not None:
            return event_error(captured.error)
        if captured.complete and captured.choices:
            return None
        why = "ended its reply before it was whole"
        if not self.stream and not captured.choices:
            why = f"answered 200 with no reply: {captured.problem or 'it has no choices'}"
        return RequestError(f"the inference server {why}", kind="upstream")

    def end(self, record: CallRecord, engine: EngineSide) -> bytes:
        if self.encoder is None:  # the engine answered in one piece
            return replay(self.speaks, self.asked, record)
        return b"".join(self.held or ()) + self.encoder.finish()

    def write_whole(self, conn: AgentConnection, record: CallRecord, captured: Captured, engine: EngineSide) -> None:
        body = self.replayed(record)
        conn.write(reply(200, body, keep_alive=self.keep_alive))

    def replayed(self, record: CallRecord) -> bytes:
        return replay(self.speaks, self.asked, record)

    def forget(self) -> None:
        super().forget()
        self.encoder = None

    def error_event(self, error: RequestError) -> bytes:
        return (self.encoder or self._encoder()).error(error)
