"""Wire formats of the model APIs that agents speak, sans-I/O: requests in, answers out, whole and streamed.

    dialect = DIALECTS["anthropic"]
    request = dialect.parse_request(body)  # RequestError names the field at fault
    encoder = dialect.encoder(request, reply_id=new_id("chatcmpl-"))
    out = encoder.start() + encoder.feed(Delta(text="hi")) + encoder.feed(Delta(finish_reason="stop")) + encoder.finish()

What engines answer is read in `gateway.capture`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import KINDS, RequestError, context_overflow, error_body, unsupported
from . import anthropic, anthropic_stream, chat, completions, responses, responses_stream
from .builder import deltas_of, encode_event
from .canonical import (
    Choice,
    Delta,
    DialectName,
    ModelRequest,
    Reply,
    Sampling,
    ToolCall,
    ToolDelta,
    Usage,
    new_id,
    text_of,
)


class StreamEncoder(Protocol):
    """Deltas -> bytes for the agent: ``start``, then ``feed`` per delta, then ``finish`` or ``error``."""

    def start(self) -> bytes: ...
    def feed(self, delta: Delta) -> bytes: ...
    def finish(self) -> bytes: ...
    def error(self, error: RequestError) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One wire format: how it reads requests, and how it writes answers."""

    name: DialectName
    parse_request: Callable[[bytes | dict[str, Any]], ModelRequest]
    encode_reply: Callable[[Reply, ModelRequest], bytes]
    encoder: Callable[..., StreamEncoder]


DIALECTS: dict[str, Dialect] = {
    "chat": Dialect(
        name="chat",
        parse_request=chat.parse_request,
        encode_reply=chat.encode_reply,
        encoder=chat.Encoder,
    ),
    "completions": Dialect(
        name="completions",
        parse_request=completions.parse_request,
        encode_reply=completions.encode_reply,
        encoder=completions.Encoder,
    ),
    "responses": Dialect(
        name="responses",
        parse_request=responses.parse_request,
        encode_reply=responses.encode_reply,
        encoder=responses_stream.Encoder,
    ),
    "anthropic": Dialect(
        name="anthropic",
        parse_request=anthropic.parse_request,
        encode_reply=anthropic.encode_reply,
        encoder=anthropic_stream.Encoder,
    ),
}

__all__ = [
    "DIALECTS",
    "KINDS",
    "Choice",
    "Delta",
    "Dialect",
    "DialectName",
    "ModelRequest",
    "Reply",
    "RequestError",
    "Sampling",
    "StreamEncoder",
    "ToolCall",
    "ToolDelta",
    "Usage",
    "context_overflow",
    "deltas_of",
    "encode_event",
    "error_body",
    "new_id",
    "text_of",
    "unsupported",
]
