"""Token ids and logprobs of a reply: out of its JSON into packed arrays, and out of what the agent gets of it.

A reply is decoded once, with its numbers as they came (`msgspec.Raw`). They are decoded by themselves, those of many events at
once, and cut out of the text for agents that did not ask for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from ...errors import CaptureError
from ...messages.errors import NOT_JSON
from .record import pack_ids, pack_logprobs

NULL = b"null"
ABSENT = msgspec.Raw(NULL)  # a union with None would make the decoder build the value


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _OwnWords(msgspec.Struct, gc=False):
    content: list[dict[str, Any]] | None = None


_ids = msgspec.json.Decoder(list[int])
_id_lists = msgspec.json.Decoder(list[list[int] | None])
_logprobs = msgspec.json.Decoder(list[_Logprobs | None])
_own_words = msgspec.json.Decoder(_OwnWords)
_PROMPT = b'"prompt_token_ids":['
SHORT = 8 * 2**10  # bytes: prompt ids up to here are decoded with the rest
_NEAR_END = 16 * 2**10  # engines write the prompt ids before or after everything else


def raw(value: msgspec.Raw) -> bytes | None:
    """A member's JSON. None: it is not there, or null."""
    data = bytes(value)
    return None if data == NULL else data


def parse_ids(text: bytes) -> bytes:
    """JSON list content (no brackets) to packed ids. Raises: CaptureError."""
    try:
        return pack_ids(_ids.decode(b"[%b]" % text))
    except NOT_JSON as e:
        raise CaptureError(f"the engine's token ids are not a list of integers: {e}") from e


def packed_ids(lists: Sequence[msgspec.Raw]) -> bytes | None:
    """Lists of token ids, one behind the other. None: there is none. Raises: CaptureError."""
    try:
        decoded = [ids for ids in _id_lists.decode(b"[%b]" % b",".join(lists)) if ids is not None]
    except NOT_JSON as e:
        raise CaptureError(f"the engine's token ids cannot be read: {e}") from e
    if not decoded:
        return None
    return pack_ids(decoded[0] if len(decoded) == 1 else [i for ids in decoded for i in ids])


def packed_logprobs(parts: Sequence[msgspec.Raw]) -> bytes | None:
    """The logprobs of sampled tokens, one part behind the other. None: there are none. Raises: CaptureError."""
    try:
        decoded = [part for part in _logprobs.decode(b"[%b]" % b",".join(parts)) if part is not None]
    except NOT_JSON as e:
        raise CaptureError(f"the engine's logprobs cannot be read: {e}") from e
    found = [part.content for part in decoded if part.content is not None]
    return pack_logprobs([entry.logprob for content in found for entry in content]) if found else None


def own_words(logprobs: bytes) -> list[dict[str, Any]] | None:
    """Logprobs as the engine wrote them, for an agent that asked for them. None: there are none, or they cannot be read."""
    try:
        return _own_words.decode(logprobs).content
    except NOT_JSON:
        return None


def brackets(value: msgspec.Raw) -> bytes | None:
    """The text between the brackets of a list."""
    data = raw(value)
    return None if data is None else data.strip()[1:-1]


def take_prompt(body: bytes) -> tuple[bytes | None, bytes]:
    """Cut long prompt ids out of a reply before it is decoded: they grow with the session, and mostly repeat.

    Inside a JSON string a quote is always escaped, so these bytes can only be a key with a list. Short ones stay in:
    decoding past them costs less than copying the rest.
    """
    if len(body) < SHORT:
        return None, body
    start = body.find(_PROMPT, 0, _NEAR_END)
    if start < 0:
        start = body.rfind(_PROMPT, max(0, len(body) - _NEAR_END))
    if start < 0:
        start = body.find(_PROMPT)
    end = body.find(b"]", start) if start >= 0 else -1
    first = start + len(_PROMPT)
    if end - first < SHORT:
        return None, body
    return body[first:end], b"".join((body[: first - 1], NULL, body[end + 1 :]))


class Numbered(msgspec.Struct, gc=False):
    """A choice, with its numbers as they came."""

    index: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    token_ids: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT


def without_numbers(text: bytes, choices: Iterable[Numbered], prompt: msgspec.Raw) -> bytes:
    """A reply's JSON, or an event's, without token ids and logprobs; members spaced like no engine's stay."""
    for choice in choices:
        logprobs, ids = choice.logprobs, choice.token_ids
        if logprobs is not ABSENT and ids is not ABSENT and len(text) < SHORT:
            head, found, rest = text.partition(b',"logprobs":%b' % logprobs)
            middle, also, tail = rest.partition(b',"token_ids":%b' % ids)
            if found and also:  # as vLLM writes its events; the other way takes twice as long
                text = head + middle + tail
                logprobs = ids = ABSENT
        if logprobs is not ABSENT:
            text = _cut(text, b'"logprobs":', logprobs)
        if ids is not ABSENT:
            text = _cut(text, b'"token_ids":', ids)
    return text if prompt is ABSENT else _cut(text, b'"prompt_token_ids":', prompt)


def _cut(text: bytes, key: bytes, value: msgspec.Raw) -> bytes:
    """The text without this member and one comma beside it: alone the value's bytes might stand elsewhere too, in a string."""
    data = bytes(value)
    start = text.find(key)
    while start >= 0:
        at = start + len(key)
        if text[at : at + 1] == b" ":
            at += 1
        if text.startswith(data, at):
            head, tail = text[:start].rstrip(), text[at + len(data) :]
            return head[:-1] + tail if head.endswith(b",") else head + tail.lstrip().removeprefix(b",")
        start = text.find(key, at)
    return text
