"""Calls whose dialect is not the engine's: Anthropic messages and OpenAI responses over a chat endpoint.

The request becomes a chat completion, the reply is read back into deltas and written in the agent's dialect. What is
recorded is the chat exchange, so every dialect leaves the same turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import UpstreamError
from .calls import Call
from .dialects import DIALECTS, ChatStream, Dialect, RequestError, StreamEncoder, decode_reply
from .dialects import Request as Asked
from .dialects.builder import deltas_of
from .dialects.canonical import Choice, Delta, Reply, ToolCall, Usage, new_id
from .engine_errors import upstream_error
from .exchange import Fields
from .records import CallRecord
from .wire import chunk, reply, stream_head

if TYPE_CHECKING:
    from .listener import AgentConnection
    from .server import Gateway
    from .sessions import Session

_fields = msgspec.json.Decoder(Fields)
_to_json = msgspec.json.Encoder().encode
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class SpokenCall(Call):
    """A call that is answered in its dialect's own words, written from deltas."""

    __slots__ = ("asked", "encoder", "reply_id", "sent", "speaks")

    relays = False

    def __init__(self, gateway: Gateway, conn: AgentConnection, session: Session, dialect: str) -> None:
        super().__init__(gateway, conn, session, dialect)
        self.speaks: Dialect = DIALECTS[dialect]
        self.asked = Asked(dialect=self.speaks.name, model="")
        self.encoder: StreamEncoder | None = None
        self.sent: list[bytes] = []
        self.reply_id = ""

    def _say(self, deltas: list[Delta]) -> None:
        """Write deltas to the agent; from the finish reason on they wait for the record."""
        encoder = self.encoder
        if encoder is None:
            encoder = self.encoder = self.speaks.encoder(self.asked, reply_id=self.reply_id, model=self.asked.model)
            out = [encoder.start()]
        else:
            out = []
        for delta in deltas:
            if self.held is None and delta.finish_reason is not None and self.n == 1:
                self.held = []
            (out if self.held is None else self.held).append(encoder.feed(delta))
        data = b"".join(out)
        conn = self.conn
        if not data or conn is None:
            return
        self.sent.append(data)
        if not self.relaying:
            self.relaying = True
            conn.write(stream_head(200, EVENT_STREAM, keep_alive=self.keep_alive) + chunk(data))
        else:
            conn.write(chunk(data))

    def _sent(self) -> bytes:
        return b"".join(self.sent)

    def _broken(self) -> RequestError | None:
        captured = self.captured
        if captured is None or (captured.complete and captured.error is None and captured.choices):
            return None
        if captured.error is not None:
            return RequestError(upstream_error(500, b'{"error":%b}' % captured.error).message, kind="upstream")
        return RequestError("the inference server ended its reply before it was whole", kind="upstream")

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return EVENT_STREAM

    def _stream_end(self) -> bytes:
        if self.encoder is None:
            self._say([])
        held = b"".join(self.held) if self.held else b""
        return held + (self.encoder.finish() if self.encoder is not None else b"")

    def _error_event(self, error: RequestError) -> bytes:
        return self.encoder.error(error) if self.encoder is not None else super()._error_event(error)

    def replayed(self, record: CallRecord) -> bytes:
        said = reply_of(record)
        if not self.stream:
            return self.speaks.encode_reply(said, self.asked)
        encoder = self.speaks.encoder(self.asked, reply_id=said.id, model=said.model)
        return b"".join([encoder.start(), *map(encoder.feed, deltas_of(said)), encoder.finish()])


class TranslatedCall(SpokenCall):
    """A call in another dialect over a chat endpoint."""

    __slots__ = ("reader",)

    def __init__(self, gateway: Gateway, conn: AgentConnection, session: Session, dialect: str) -> None:
        super().__init__(gateway, conn, session, dialect)
        self.reader = ChatStream()

    def _read(self, body: bytes, fields: Fields) -> Fields:
        self.asked = self.speaks.parse_request(body)
        self.reply_id = new_id("chatcmpl-")
        self.n = self.asked.n
        return _fields.decode(_to_json(self.asked.to_chat_body()))

    def _compose(self, fields: Fields, path: bytes) -> None:
        super()._compose(fields, b"chat/completions")

    def _broken(self) -> RequestError | None:
        captured = self.captured
        unread = captured is not None and captured.problem is not None and not captured.choices
        return None if unread else super()._broken()  # where only the tokens are at fault the agent gets its text

    def _relay(self, data: bytes) -> None:
        try:
            self._say(self.reader.feed(data))
        except UpstreamError as e:
            self._stop_upstream()
            self._again_never(str(e))

    def _write_whole(self, conn: AgentConnection) -> None:
        try:
            body = self.speaks.encode_reply(decode_reply(self._body()), self.asked)
        except UpstreamError as e:
            raise RequestError(str(e), kind="upstream") from e
        conn.write(reply(200, body, keep_alive=self.keep_alive))


def reply_of(record: CallRecord) -> Reply:
    """A recorded reply, canonical again."""
    choices = []
    for choice in record.choices:
        message = msgspec.json.decode(choice.message)
        calls = [
            ToolCall(id=c.get("id") or "", name=c["function"]["name"], arguments=c["function"].get("arguments") or "")
            for c in message.get("tool_calls") or ()
        ]
        choices.append(
            Choice(
                index=choice.index,
                content=message.get("content") or "",
                reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
                tool_calls=calls,
                finish_reason=choice.finish_reason,
            )
        )
    usage = None
    if record.usage is not None:
        counted = msgspec.json.decode(record.usage)
        usage = Usage(prompt_tokens=counted.get("prompt_tokens"), completion_tokens=counted.get("completion_tokens"))
    return Reply(
        id=record.reply_id or record.call_id,
        model=record.model or "",
        created=int(record.started_s),
        choices=choices,
        usage=usage,
    )
