"""The request of a model call, as far as it is the same for all engines."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ...messages.wire import DIALECTS, ModelRequest, responses
from ...messages.wire.canonical import new_id
from ...messages.wire.fields import HALF_SURROGATE, read_body
from ...messages.wire.passthrough import Fields, number
from ...messages.wire.responses import Recorded

_NUMBERS = frozenset(
    {"echo", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)
# A content part that is no text. In a string of JSON its quotes would be escaped.
_NO_TEXT = re.compile(rb'"(?:image_url|input_image|image_embeds|video_url|audio_url|input_audio)"')
LARGE_BYTES = 2**20  # hashing more takes milliseconds, which a thread can spend
_fields = msgspec.json.Decoder(Fields).decode
_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class CallRequest:
    """The request of an agent.

    ``fields`` are its members, in the end those of a chat completion with the session's settings. ``digest`` is the same for the
    same request. ``asked`` is the canonical request, of calls whose reply is encoded here. ``again``: the client reports that
    it repeats a request; ``keyed``: it identifies the request by a key.
    """

    dialect: str
    body: bytes = b""
    fields: Fields = field(default_factory=dict)
    digest: int = 0
    tag: str | None = None
    stream: bool = False
    again: bool = False
    keyed: bool = False
    asked: ModelRequest = field(default_factory=partial(ModelRequest, dialect="chat", model=""))
    reply_id: str = ""
    left_out: Counter[str] = field(default_factory=Counter)  # the parts of the history that were left out, by kind

    @property
    def n(self) -> int:
        """Return the number of choices that the agent asked for."""
        return number(self.fields.get("n", msgspec.Raw(b"1"))) or 1

    @property
    def logprobs(self) -> bool:
        """Return True if the agent asked for logprobs."""
        return self._asks("logprobs")

    @property
    def token_ids(self) -> bool:
        """Return True if the agent asked for token ids."""
        return self._asks("return_token_ids")

    @property
    def numbers(self) -> bool:
        """Return True if the agent asked for token ids or logprobs."""
        return not _NUMBERS.isdisjoint(self.fields) and any(map(self._asks, _NUMBERS))

    @property
    def images(self) -> bool:
        """Return True if the messages have images, sound or video."""
        return _NO_TEXT.search(self.fields.get("messages", b"")) is not None

    def _asks(self, name: str) -> bool:
        return bytes(self.fields.get(name, b"null")) not in (b"null", b"false")

    def parse(self, recorded: Recorded) -> ModelRequest:
        """Read the request into its canonical form, ``asked``. ``recorded`` finds the session's replies. Raises: RequestError."""
        if self.dialect == "responses":
            asked = responses.parse_request(self.body, recorded=recorded)
        else:
            asked = DIALECTS[self.dialect].parse_request(self.body)
        self.asked, self.reply_id = asked, new_id("chatcmpl-")
        self.left_out += Counter(asked.left_out)
        return asked

    def as_chat(self, allowed: Collection[str]) -> Fields:
        """Return the members of the canonical request as a chat completion.

        Fields that nothing here reads go to the engine if they are ``allowed``, and are left out otherwise.
        """
        if allowed:
            other, unknown = self.asked.sampling.other, self.asked.unknown
            other |= {name: value for name, value in unknown.items() if name in allowed}
        return {name: msgspec.Raw(_to_json(value)) for name, value in self.asked.to_chat_body().items()}


async def read_request(body: bytes, headers: Mapping[str, str], dialect: str, *, tag: str | None) -> CallRequest:
    """Decode a request. Raises: RequestError."""
    # AWS's clients use another header for the key.
    key = headers.get("idempotency-key") or headers.get("amz-sdk-invocation-id") or ""
    head = f"{dialect} {tag or ''} {key} ".encode("utf-8", "surrogateescape")
    digest = _digest(head, body) if len(body) < LARGE_BYTES else await asyncio.to_thread(_digest, head, body)
    fields, body, halves = read_body(body, _fields)
    return CallRequest(
        dialect=dialect,
        body=body,
        fields=fields,
        digest=digest,
        tag=tag,
        stream=bytes(fields.get("stream", b"")) == b"true",
        again=headers.get("x-stainless-retry-count", "0") != "0",
        keyed=key != "",
        left_out=Counter({HALF_SURROGATE: halves} if halves else {}),
    )


def _digest(head: bytes, body: bytes) -> int:
    """Return a number for a request that is the same in every process: a repetition may come after a restart."""
    made = hashlib.sha256(head)
    made.update(body)
    return int.from_bytes(made.digest()[:8], "big", signed=True)
