"""Wire formats of the model APIs that agents speak, sans-I/O: requests in, answers out, whole and streamed.

    dialect = DIALECTS["anthropic"]
    request = dialect.parse_request(body)  # RequestError names the field at fault
    encoder = dialect.encoder(request, reply_id=new_id("chatcmpl-"))
    out = encoder.start() + encoder.feed(Delta(text="hi")) + encoder.feed(Delta(finish_reason="stop")) + encoder.finish()

One file per API declares the members of a request, reads its history, and writes replies and errors. To add an API, write such a
file and list it in `DIALECTS`. `gateway.capture` reads the answers of engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..._event_stream import CONTENT_TYPE
from ..errors import RequestError, context_overflow, openai_error
from . import anthropic, bedrock, chat, gemini, responses
from .canonical import Choice, Delta, ModelRequest, Reply, ToolCall, ToolDelta, Usage, new_id
from .stream import BlockEncoder, StreamEncoder, deltas_of


@dataclass(frozen=True)
class Dialect:
    """A wire format, which reads requests and writes answers.

    ``path`` is that of a call below an agent's base URL.
    ``idle`` is what a stream shows before it begins, ``stream_type`` its content type. ``error_head`` gives an error's status and
    headers.
    ``encoder`` makes a `StreamEncoder`. At the end it has the whole reply as its ``body``, except for chat.
    """

    name: str
    path: str
    parse_request: Callable[..., ModelRequest]
    encoder: Callable[..., StreamEncoder]
    error_dict: Callable[..., dict[str, Any]]
    idle: bytes = b": waiting for the model\n\n"
    stream_type: str = "text/event-stream; charset=utf-8"
    error_head: Callable[[RequestError], tuple[int, dict[str, str]]] = lambda error: (error.status or 500, {})

    def encode_reply(self, reply: Reply, request: ModelRequest) -> bytes:
        """Encode a complete reply, as a stream if the request asks for one."""
        encoder = self.encoder(request, reply_id=reply.id, model=reply.model, created=reply.created)
        if isinstance(encoder, chat.Encoder) and not request.stream:
            return msgspec.json.encode(chat.whole_reply(reply, request))
        stream = b"".join([encoder.start(), *map(encoder.feed, deltas_of(reply)), encoder.finish()])
        if isinstance(encoder, BlockEncoder) and not request.stream:
            return msgspec.json.encode(encoder.body)
        return stream


_AWS: Any = {"idle": bedrock.PING, "stream_type": CONTENT_TYPE, "error_head": bedrock.error_head}

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("chat", "chat/completions", chat.parse_request, chat.Encoder, openai_error),
        Dialect("responses", "responses", responses.parse_request, responses.Encoder, responses.error_dict),
        Dialect("anthropic", "messages", anthropic.parse_request, anthropic.Encoder, anthropic.error_dict),
        Dialect(
            *("gemini", gemini.GENERATE.decode(), gemini.parse_request, gemini.Encoder, gemini.error_dict),
            idle=gemini.IDLE,
        ),
        Dialect(
            *("bedrock", bedrock.CONVERSE.decode(), bedrock.parse_request, bedrock.Encoder, bedrock.error_dict),
            **_AWS,
        ),
        Dialect(
            "bedrock-invoke",
            bedrock.INVOKE.decode(),
            bedrock.parse_invoke,
            bedrock.invoke_encoder,
            bedrock.error_dict,
            **_AWS,
        ),
    )
}


def error_body(dialect: str, error: RequestError) -> bytes:
    """Return the JSON body of an error response in a dialect."""
    return msgspec.json.encode(DIALECTS[dialect].error_dict(error))


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
    "error_body",
    "new_id",
]
