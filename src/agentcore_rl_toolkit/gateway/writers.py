"""Write a reply for its agent: the bytes of the server, or a dialect's encoding of the deltas.

Both writers have the same methods. ``write`` encodes a part of a stream, ``ping`` a sign that more is coming, ``finish`` the end
of a stream, ``error`` the end of a stream that cannot be completed, ``whole`` a reply that is not streamed, and ``replayed`` the
reply of a recorded call. ``broken`` returns why the agent must not treat the reply as complete.
"""

from __future__ import annotations

import msgspec

from ..messages.wire import DIALECTS, Delta, ModelRequest, RequestError, StreamEncoder, error_body
from .capture.record import CallRecord, Captured
from .capture.replay import reply_of
from .engines.errors import event_error
from .http.request import CallRequest
from .http.responses import JSON, passed
from .relayed_chat import RelayedChat

_JSON = {"content-type": JSON}


def _headers(request: CallRequest) -> dict[str, str]:
    if not request.stream:
        return _JSON
    return {"content-type": DIALECTS[request.dialect].stream_type, "cache-control": "no-cache"}


class PassingWriter:
    """Writes a server's bytes, for an agent that speaks its dialect."""

    def __init__(self, request: CallRequest, engine: RelayedChat) -> None:
        self._request = request
        self._engine = engine

    def headers(self) -> dict[str, str]:
        return {**_headers(self._request), **passed(self._engine.headers)}

    def write(self, delta: Delta) -> bytes:
        return delta.event

    def ping(self) -> bytes:
        return DIALECTS["chat"].idle

    def finish(self, record: CallRecord) -> bytes:
        return bytes(self._engine.reader.rest)

    def error(self, error: RequestError) -> bytes:
        return b"data: " + error_body("chat", error) + b"\n\n"

    def broken(self, captured: Captured, *, begun: bool) -> RequestError | None:
        engine, whole_reply = self._engine, not self._request.stream and bool(captured.choices)
        if captured.error is not None:
            return None if begun or whole_reply else event_error(captured.error)
        if captured.problem is not None and engine.reader.finished and engine.plain_endpoint and self._request.stream:
            return None  # the agent may understand such an endpoint although nothing can be recorded of it
        return None if whole_reply else _incomplete(captured, stream=self._request.stream)

    def whole(self, record: CallRecord) -> bytes:
        return self._engine.body

    def replayed(self, record: CallRecord) -> bytes:
        request = self._request
        options = request.fields.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        asked = ModelRequest(dialect="chat", model="", stream=request.stream, include_usage=usage, logprobs=True)
        reply = DIALECTS["chat"].encode_reply(reply_of(record), asked)
        if request.stream:
            return reply
        body = msgspec.json.decode(reply)
        for choice, recorded in zip(body["choices"], record.choices, strict=True):
            choice["message"] = msgspec.Raw(recorded.message)  # the server's message with all its members
        return msgspec.json.encode(body)


class EncodingWriter:
    """Encodes deltas in the agent's dialect."""

    def __init__(self, request: CallRequest) -> None:
        self._request = request
        self._dialect = DIALECTS[request.dialect]
        self._encoder: StreamEncoder | None = None

    def headers(self) -> dict[str, str]:
        return _headers(self._request)

    def _make(self) -> StreamEncoder:
        asked = self._request.asked
        return self._dialect.encoder(asked, reply_id=self._request.reply_id, model=asked.model)

    def write(self, delta: Delta) -> bytes:
        if self._encoder is None:
            self._encoder = self._make()
            return self._encoder.start() + self._encoder.feed(delta)
        return self._encoder.feed(delta)

    def ping(self) -> bytes:
        return self._dialect.idle if self._encoder is None else self._encoder.ping()

    def finish(self, record: CallRecord) -> bytes:
        return self.whole(record) if self._encoder is None else self._encoder.finish()

    def error(self, error: RequestError) -> bytes:
        return (self._encoder or self._make()).error(error)

    def broken(self, captured: Captured, *, begun: bool) -> RequestError | None:
        if captured.error is not None:
            return event_error(captured.error)
        return _incomplete(captured, stream=self._request.stream)

    def whole(self, record: CallRecord) -> bytes:
        return self._dialect.encode_reply(reply_of(record), self._request.asked)

    def replayed(self, record: CallRecord) -> bytes:
        return self.whole(record)


def _incomplete(captured: Captured, *, stream: bool) -> RequestError | None:
    if captured.complete and captured.choices:
        return None
    why = "ended its reply too early"
    if not stream and not captured.choices:
        why = f"answered 200 without a reply: {captured.problem or 'it has no choices'}"
    return RequestError(f"the engine {why}", kind="upstream")


Writer = PassingWriter | EncodingWriter


def writer_of(request: CallRequest, engine: object) -> Writer:
    """Return the writer of a call's reply."""
    if isinstance(engine, RelayedChat) and engine.passes:
        return PassingWriter(request, engine)
    return EncodingWriter(request)
