"""Wire formats of the model APIs that agents speak, sans-I/O: requests in, answers out, streams both ways.

>>> dialect = dialect_of("/v1/messages") >>> request = dialect.parse_request(body)             # RequestError names
the field at fault >>> encoder = dialect.encoder(request, reply_id=new_id("chatcmpl-")) >>> out = encoder.start() +
encoder.feed(Delta(text="hi")) + encoder.feed(Delta(finish_reason="stop")) + encoder.finish()"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from . import anthropic, anthropic_stream, chat, completions, openai_stream, responses, responses_stream
from .builder import ReplyBuilder, deltas_of
from .canonical import Choice, Delta, DialectName, Reply, Request, Sampling, ToolCall, ToolDelta, Usage, new_id, text_of
from .errors import KINDS, RequestError, context_overflow, error_body, unsupported
from .sse import DONE, Event, SSEParser, encode_event


class StreamEncoder(Protocol):
    """Deltas -> bytes for the agent: ``start``, then ``feed`` per delta, then ``finish`` or ``error``."""

    content_type: str

    def start(self) -> bytes: ...
    def feed(self, delta: Delta) -> bytes: ...
    def finish(self) -> bytes: ...
    def error(self, error: RequestError) -> bytes: ...


class StreamDecoder(Protocol):
    """Bytes of a stream -> deltas, and the whole reply: ``feed`` per slice, ``finish`` at the end of the bytes.

    ``done`` says that the stream said it was over; ``reply().complete`` that every choice finished.
    """

    done: bool

    def feed(self, data: bytes) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...
    def reply(self) -> Reply: ...
    @property
    def error(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One wire format: how it reads requests, and how it writes and reads answers."""

    name: DialectName
    parse_request: Callable[[bytes | dict[str, Any]], Request]
    encode_reply: Callable[[Reply, Request], bytes]
    encoder: Callable[..., StreamEncoder]
    decode_reply: Callable[[bytes], Reply]
    decoder: Callable[[], StreamDecoder]

    def error_body(self, error: RequestError, *, request_id: str | None = None) -> bytes:
        return error_body(self.name, error, request_id=request_id)


DIALECTS: dict[str, Dialect] = {
    "chat": Dialect(
        name="chat",
        parse_request=chat.parse_request,
        encode_reply=chat.encode_reply,
        encoder=chat.Encoder,
        decode_reply=openai_stream.decode_reply,
        decoder=openai_stream.ChatStream,
    ),
    "completions": Dialect(
        name="completions",
        parse_request=completions.parse_request,
        encode_reply=completions.encode_reply,
        encoder=completions.Encoder,
        decode_reply=openai_stream.decode_reply,
        decoder=openai_stream.ChatStream,
    ),
    "responses": Dialect(
        name="responses",
        parse_request=responses.parse_request,
        encode_reply=responses.encode_reply,
        encoder=responses_stream.Encoder,
        decode_reply=responses_stream.decode_reply,
        decoder=responses_stream.ResponsesStream,
    ),
    "anthropic": Dialect(
        name="anthropic",
        parse_request=anthropic.parse_request,
        encode_reply=anthropic.encode_reply,
        encoder=anthropic_stream.Encoder,
        decode_reply=anthropic_stream.decode_reply,
        decoder=anthropic_stream.AnthropicStream,
    ),
}

_PATHS = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "anthropic",
    "/messages/count_tokens": "anthropic",
}


def dialect_of(path: str) -> Dialect | None:
    """The dialect of a path below ``/v1`` (or with it), None when no model call goes there."""
    name = _PATHS.get(path.removeprefix("/v1").rstrip("/"))
    return DIALECTS[name] if name else None


__all__ = [
    "DIALECTS",
    "DONE",
    "KINDS",
    "Choice",
    "Delta",
    "Dialect",
    "DialectName",
    "Event",
    "Reply",
    "ReplyBuilder",
    "Request",
    "RequestError",
    "SSEParser",
    "Sampling",
    "StreamDecoder",
    "StreamEncoder",
    "ToolCall",
    "ToolDelta",
    "Usage",
    "context_overflow",
    "deltas_of",
    "dialect_of",
    "encode_event",
    "error_body",
    "new_id",
    "text_of",
    "unsupported",
]
