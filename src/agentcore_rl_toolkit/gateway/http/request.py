"""The request of a model call, as far as it is the same for all engines."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from ...messages.wire import DIALECTS, ModelRequest, passthrough, responses
from ...messages.wire.canonical import new_id
from ...messages.wire.fields import HALF_SURROGATE, read_body
from ...messages.wire.passthrough import Fields
from ...messages.wire.responses import Recorded

_NUMBERS = frozenset(
    {"echo", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)
# A content part that is no text. In a string of JSON its quotes would be escaped.
_NO_TEXT = re.compile(rb'"(?:image_url|input_image|image_embeds|video_url|audio_url|input_audio)"')
LARGE_BYTES = 2**20  # hashing more takes milliseconds, which a thread can spend
T = TypeVar("T")


@dataclass(slots=True)
class CallRequest:
    """The request of an agent.

    ``fields`` are those of a chat completion, in the end with the session's settings. ``digest`` is the same for the same
    request. ``asked`` is the canonical request, of calls whose reply is encoded here. ``again``: the client reports that it
    repeats a request; ``keyed``: it identifies the request by a key.
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
    def numbers(self) -> bool:
        """Return True if the agent asked for token ids or logprobs."""
        return any(self.fields[name] not in (None, False) for name in _NUMBERS & self.fields.keys())

    @property
    def images(self) -> bool:
        """Return True if the messages have images, sound or video."""
        return _NO_TEXT.search(self.fields.get("messages", b"")) is not None

    def _decoded(self, decode: Callable[[bytes], T]) -> T:
        found, _, halves = read_body(self.body, decode)
        if halves:
            self.left_out[HALF_SURROGATE] += halves
        return found

    def read(self) -> Fields:
        """Return the fields of a request that is passed on. Raises: RequestError."""
        fields = self._decoded(passthrough.read)
        self.stream = fields.get("stream") is True
        return fields

    def parse(self, recorded: Recorded) -> ModelRequest:
        """Read the request into its canonical form, ``asked``. ``recorded`` finds the session's replies. Raises: RequestError."""
        given = self._decoded(msgspec.json.decode)
        if self.dialect == "responses":
            asked = responses.parse_request(given, recorded=recorded)
        else:
            asked = DIALECTS[self.dialect].parse_request(given)
        self.asked, self.stream, self.reply_id = asked, asked.stream, new_id("chatcmpl-")
        self.left_out += Counter(asked.left_out)
        return asked

    def as_chat(self, allowed: Collection[str]) -> Fields:
        """Return the members of the canonical request as a chat completion.

        Fields that nothing here reads go to the engine if they are ``allowed``, and are left out otherwise.
        """
        asked = self.asked
        asked.sampling.other |= {name: value for name, value in asked.unknown.items() if name in allowed}
        return {**asked.to_chat_body(), "messages": msgspec.Raw(msgspec.json.encode(asked.messages))}


async def read_request(body: bytes, headers: Mapping[str, str], dialect: str, *, tag: str | None) -> CallRequest:
    """Return a request, whose body is still to be read."""
    # AWS's clients use another header for the key.
    key = headers.get("idempotency-key") or headers.get("amz-sdk-invocation-id") or ""
    head = f"{dialect} {tag or ''} {key} ".encode("utf-8", "surrogateescape")
    return CallRequest(
        dialect=dialect,
        body=body,
        digest=_digest(head, body) if len(body) < LARGE_BYTES else await asyncio.to_thread(_digest, head, body),
        tag=tag,
        again=headers.get("x-stainless-retry-count", "0") != "0",
        keyed=key != "",
    )


def _digest(head: bytes, body: bytes) -> int:
    """Return a number for a request that is the same in every process: a repetition may come after a restart."""
    made = hashlib.sha256(head)
    made.update(body)
    return int.from_bytes(made.digest()[:8], "big", signed=True)
