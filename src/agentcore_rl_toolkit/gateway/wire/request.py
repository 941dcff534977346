"""The request of a model call, as far as it is the same for all engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...messages.dialects import DIALECTS, ModelRequest, RequestError
from ...messages.dialects.canonical import new_id
from ...messages.dialects.passthrough import Fields
from ...messages.errors import NOT_JSON
from ..capture.asked import wants_logprobs, wants_numbers
from ..sessions.session import Session
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

    def translate(self, session: Session, as_sent: Callable[[Messages], Messages], allowed: Collection[str]) -> Fields:
        """Read the request into its canonical form. Returns it as a chat completion, without messages if they are in `long`.

        ``as_sent`` gives messages the form in which the server, and the record, has them. Fields that nothing here reads go to
        the engine if they are ``allowed``, and are left out otherwise.

        Raises: RequestError.
        """
        dialect, request = DIALECTS[self.dialect], self.long
        if request is None:
            asked = dialect.parse_request(self.body)
        else:
            asked, self.long = translate(request, session.texts.translated, dialect, as_sent)
        self.asked, self.n, self.reply_id = asked, asked.n, new_id("chatcmpl-")
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
    try:
        long = _long(body, session, dialect, as_they_are=as_they_are) if len(body) >= LONG else None
        if long is None:
            fields, digest, read = decoded(body), digest_of_body(body), body
        else:
            fields, digest, read = long.fields, long.digest(), long.read
    except NOT_JSON as e:
        raise RequestError(f"the request body must be a JSON object: {e}") from e
    key = headers.get("idempotency-key")
    digest = digest_of(dialect.encode(), (tag or "").encode(), (key or "").encode(), b"%d" % digest)
    stream = fields.get("stream")
    return CallRequest(
        dialect=dialect,
        body=read,
        fields=fields,
        long=long,
        digest=digest,
        stream=stream is not None and bytes(stream) == b"true",
        again=headers.get("x-stainless-retry-count", "0") != "0",
        keyed=key is not None,
    )


def _long(body: bytes, session: Session, dialect: str, *, as_they_are: bool) -> LongRequest | None:
    """A long request in two parts. Raises: msgspec.DecodeError, RecursionError when it is not a JSON object."""
    if as_they_are:
        return understand(body, session.texts.messages)
    return understand(body, session.texts.translated, LISTS[dialect])
