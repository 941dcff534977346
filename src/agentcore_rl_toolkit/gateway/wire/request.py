"""The request of a model call, as far as it is the same for all engines."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...messages.wire import DIALECTS, ModelRequest
from ...messages.wire.canonical import new_id
from ...messages.wire.fields import read_body
from ...messages.wire.passthrough import Fields
from ...messages.wire.responses import Recorded
from ...messages.wire.surrogates import HALF_SURROGATE
from ..capture.asked import LEFT_OUT, wants_logprobs, wants_numbers
from ..sessions.session import Session
from .bodies import BodyParser, ParsedBody
from .long_requests import LISTS, LONG, LongRequest, decoded, digest_of, digest_of_body, translate, understand

Messages = list[dict[str, Any]]
_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class CallRequest:
    """What an agent asks for.

    ``fields`` are the members of the request, as the server gets them and the record has them. A long request has its messages
    in ``long``. ``digest`` is the same for the same request. ``asked`` is the canonical request, of calls whose reply is
    encoded here. ``again``: the client reports that it repeats a request; ``keyed``: it identifies the request by a key.
    """

    dialect: str
    body: bytes  # the part that was decoded
    fields: Fields
    long: LongRequest | None
    digest: int
    stream: bool
    again: bool
    keyed: bool
    n: int = 1
    asked: ModelRequest = field(default_factory=lambda: ModelRequest(dialect="chat", model=""))
    reply_id: str = ""
    left_out: Counter[str] = field(default_factory=Counter)  # of the history, by kind
    parsed: ParsedBody | None = None  # of a large body

    @property
    def logprobs(self) -> bool:
        """Whether the agent asked for logprobs."""
        return wants_logprobs(self.fields)

    @property
    def numbers(self) -> bool:
        """Whether the agent asked for token ids or logprobs."""
        return wants_numbers(self.fields)

    @property
    def messages(self) -> bytes:
        """The messages as JSON."""
        return self.long.text if self.long is not None else bytes(self.fields.get("messages", b""))

    def recorded_fields(self, fields: Fields) -> Fields:
        """The fields as they are recorded."""
        if not self.left_out:
            return dict(fields)
        return {**fields, LEFT_OUT: msgspec.Raw(_to_json(self.left_out))}

    def translate(
        self,
        session: Session,
        as_sent: Callable[[Messages], Messages],
        allowed: Collection[str],
        recorded: Recorded,
    ) -> Fields:
        """Read the request into its canonical form. Returns it as a chat completion, without messages if they are in `long`.

        ``as_sent`` gives messages the form in which the server, and the record, has them. Fields that nothing here reads go to
        the engine if they are ``allowed``, and are left out otherwise. ``recorded`` finds the session's replies.

        Raises: RequestError.
        """
        dialect, request = DIALECTS[self.dialect].with_recorded(recorded), self.long
        if self.parsed is not None:
            asked = self.parsed.request
            sent = zip(self.parsed.texts, asked.messages, as_sent(asked.messages), strict=True)
            text = b"[" + b",".join(text if new is old else _to_json(new) for text, old, new in sent)
            self.long = LongRequest({}, text, zlib.crc32(text))
        elif request is None:
            asked = dialect.parse_request(self.body)
        else:
            asked, self.long = translate(request, session.texts.translated, dialect, as_sent)
        self.asked, self.n, self.reply_id = asked, asked.n, new_id("chatcmpl-")
        self.left_out += Counter(asked.left_out)
        asked.sampling.other |= {name: value for name, value in asked.unknown.items() if name in allowed}
        body = asked.to_chat_body()
        if self.long is not None:
            del body["messages"]
        else:
            body["messages"] = as_sent(body["messages"])
        return {name: msgspec.Raw(_to_json(value)) for name, value in body.items()}


def empty_request(dialect: str) -> CallRequest:
    """Stands for a request that was not read."""
    return CallRequest(
        dialect=dialect, body=b"", fields={}, long=None, digest=0, stream=False, again=False, keyed=False
    )


def read_request(
    body: bytes, headers: Mapping[str, str], session: Session, dialect: str, *, tag: str | None, as_they_are: bool
) -> CallRequest:
    """Decode a request. ``as_they_are``: the server gets the messages unchanged. Raises: RequestError."""

    def read(body: bytes) -> tuple[Fields, LongRequest | None, int, bytes]:
        long = _long(body, session, dialect, as_they_are=as_they_are) if len(body) >= LONG else None
        if long is None:
            return decoded(body), None, digest_of_body(body), body
        return long.fields, long, long.digest(), long.read

    (fields, long, digest, body), halves = read_body(body, read)
    request = _request(headers, dialect, tag, digest, fields)
    request.body, request.long = body, long
    if halves:
        request.left_out[HALF_SURROGATE] = halves
    return request


async def read_large_request(
    bodies: BodyParser,
    body: bytes,
    headers: Mapping[str, str],
    dialect: str,
    *,
    tag: str | None,
    as_they_are: bool,
    recorded: Mapping[str, dict[str, Any]],
) -> CallRequest:
    """Decode a large request in the helper process. Raises: RequestError."""
    digest = digest_of_body(body)
    if not as_they_are:
        parsed = await bodies.parse(body, dialect, recorded)
        fields = {"stream": msgspec.Raw(b"true" if parsed.request.stream else b"false")}
        request = _request(headers, dialect, tag, digest, fields)
        request.parsed = parsed
        return request
    fields, halves = await bodies.fields(body)
    request = _request(headers, dialect, tag, digest, fields)
    text = bytes(fields.get("messages", b""))
    if text[:1] == b"[":
        del fields["messages"]
        request.long = LongRequest(fields, text[:-1], zlib.crc32(text[:-1]))
    if halves:
        request.left_out[HALF_SURROGATE] = halves
    return request


def _request(headers: Mapping[str, str], dialect: str, tag: str | None, digest: int, fields: Fields) -> CallRequest:
    key = headers.get("idempotency-key")
    stream = fields.get("stream")
    return CallRequest(
        dialect=dialect,
        body=b"",
        fields=fields,
        long=None,
        digest=digest_of(dialect.encode(), (tag or "").encode(), (key or "").encode(), b"%d" % digest),
        stream=stream is not None and bytes(stream) == b"true",
        again=headers.get("x-stainless-retry-count", "0") != "0",
        keyed=key is not None,
    )


def _long(body: bytes, session: Session, dialect: str, *, as_they_are: bool) -> LongRequest | None:
    """A long request in two parts. Raises: msgspec.DecodeError, RecursionError when it is not a JSON object."""
    if as_they_are:
        return understand(body, session.texts.messages)
    return understand(body, session.texts.translated, LISTS[dialect])
