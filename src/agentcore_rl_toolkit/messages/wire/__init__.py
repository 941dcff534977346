"""Wire formats of the model APIs that agents speak, sans-I/O: requests in, answers out, whole and streamed.

    dialect = DIALECTS["anthropic"]
    request = dialect.parse_request(body)  # RequestError names the field at fault
    encoder = dialect.encoder(request, reply_id=new_id("chatcmpl-"))
    out = encoder.start() + encoder.feed(Delta(text="hi")) + encoder.feed(Delta(finish_reason="stop")) + encoder.finish()

`gateway.capture` reads the answers of engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from ..errors import RequestError, context_overflow
from . import anthropic, chat, responses
from .builder import deltas_of
from .canonical import (
    Choice,
    Delta,
    DialectName,
    ModelRequest,
    Reply,
    ToolCall,
    ToolDelta,
    Usage,
    new_id,
)


class StreamEncoder(Protocol):
    """Deltas -> bytes for the agent: ``start``, then ``feed`` per delta, then ``finish`` or ``error``. In between ``ping`` says
    that there is more to come. After ``finish`` ``body`` is the whole answer.
    """

    body: dict[str, Any]

    def start(self) -> bytes: ...
    def feed(self, delta: Delta) -> bytes: ...
    def ping(self) -> bytes: ...
    def finish(self) -> bytes: ...
    def error(self, error: RequestError) -> bytes: ...


@dataclass(frozen=True)
class Dialect:
    """One wire format: how it reads requests and writes answers."""

    name: DialectName
    parse_request: Callable[[bytes | dict[str, Any]], ModelRequest]
    encoder: Callable[..., StreamEncoder]

    def with_recorded(self, recorded: responses.Recorded) -> Dialect:
        """Return this wire format with references to items of recorded replies resolved."""
        if self.name != "responses":
            return self
        return replace(self, parse_request=partial(responses.parse_request, recorded=recorded))

    def encode_reply(self, reply: Reply, request: ModelRequest) -> bytes:
        """A whole answer, as a stream where the request asks for one."""
        if self.name == "chat" and not request.stream:
            return chat.encode_reply(reply, request)
        encoder = self.encoder(request, reply_id=reply.id, model=reply.model, created=reply.created)
        stream = b"".join([encoder.start(), *map(encoder.feed, deltas_of(reply)), encoder.finish()])
        return stream if request.stream else msgspec.json.encode(encoder.body)


DIALECTS: dict[str, Dialect] = {
    "chat": Dialect("chat", chat.parse_request, chat.Encoder),
    "responses": Dialect("responses", responses.parse_request, responses.Encoder),
    "anthropic": Dialect("anthropic", anthropic.parse_request, anthropic.Encoder),
}

__all__ = [
    "DIALECTS",
    "Choice",
    "Delta",
    "Dialect",
    "ModelRequest",
    "Reply",
    "RequestError",
    "StreamEncoder",
    "ToolCall",
    "ToolDelta",
    "Usage",
    "context_overflow",
    "new_id",
]
