"""The request of a model call, as far as it is the same for all engines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping

import msgspec

from ...messages.wire import DIALECTS, ModelRequest, passthrough, responses
from ...messages.wire.canonical import new_id
from ...messages.wire.fields import HALF_SURROGATE, read_body
from ...messages.wire.passthrough import Fields
from ...messages.wire.responses import Recorded

_NUMBERS = frozenset(
    {"echo", "logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "top_logprobs"}
)
LARGE_BYTES = 2**20  # hashing more takes milliseconds, which a thread can spend


class CallRequest:
    """The request of an agent.

    ``fields`` are those of a chat completion, in the end with the session's settings. ``asked`` is the canonical request, of
    calls whose reply is encoded here. ``digest`` is the same for the same request in every process: a repetition may come after a
    restart. ``again``: the client reports that it repeats a request; ``keyed``: it identifies the request by a key. ``left_out``
    counts the parts of the history that were left out, by kind.
    """

    asked: ModelRequest

    def __init__(self, dialect: str, body: bytes, headers: Mapping[str, str], *, tag: str | None) -> None:
        self.dialect = dialect
        self.body = body
        self.tag = tag
        # AWS's clients use another header for the key.
        self._key = headers.get("idempotency-key") or headers.get("amz-sdk-invocation-id") or ""
        self.keyed = self._key != ""
        self.again = headers.get("x-stainless-retry-count", "0") != "0"
        self.stream = False
        self.fields: Fields = {}
        self.digest = 0
        self.reply_id = ""
        self.left_out: dict[str, int] = {}

    async def read(self, recorded: Recorded, *, passes: bool, allowed: Collection[str]) -> None:
        """Make the digest, and decode the body. ``passes``: the engine gets the request as it is.

        Fields that nothing here reads go to the engine if they are ``allowed``, and are left out otherwise. ``recorded`` finds
        the session's replies. Raises: RequestError.
        """
        made = hashlib.sha256(f"{self.dialect} {self.tag or ''} {self._key} ".encode("utf-8", "surrogateescape"))
        if len(self.body) < LARGE_BYTES:
            made.update(self.body)
        else:
            await asyncio.to_thread(made.update, self.body)
        self.digest = int.from_bytes(made.digest()[:8], "big", signed=True)
        given, halves = read_body(self.body, passthrough.read if passes else msgspec.json.decode)
        if halves:
            self.leave_out({HALF_SURROGATE: halves})
        if passes:
            self.fields, self.stream = given, given.get("stream") is True
            return
        if self.dialect == "responses":
            asked = responses.parse_request(given, recorded=recorded)
        else:
            asked = DIALECTS[self.dialect].parse_request(given)
        asked.sampling.other |= {name: value for name, value in asked.unknown.items() if name in allowed}
        self.asked, self.stream, self.reply_id = asked, asked.stream, new_id("chatcmpl-")
        if asked.left_out:
            self.leave_out(asked.left_out)

    @property
    def numbers(self) -> bool:
        """Return True if the agent asked for token ids or logprobs."""
        given = self.fields
        if not given and hasattr(self, "asked"):
            given = {**self.asked.sampling.other, "logprobs": self.asked.logprobs}
        return any(given[name] not in (None, False) for name in given.keys() & _NUMBERS)

    def leave_out(self, parts: Mapping[str, int]) -> None:
        """Count parts of the history that are left out."""
        for kind, count in parts.items():
            self.left_out[kind] = self.left_out.get(kind, 0) + count
