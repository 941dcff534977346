"""Turn a finished call into its record, which has only what is new since the calls before it.

A session's prompts, message lists and other fields grow or repeat from call to call. The last texts of each kind are known by
their length and hash. A text that begins with a known one is stored as a reference to that call, and the rest. Its
beginning is hashed once more, to find the known one, and only the rest is searched and decoded.

If the engine names no weight version there are only bounds: the versions that were published when the call was sent and when its
reply was complete. Every token then counts as sampled by the older one, so that its age is never understated.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from ...errors import CaptureError
from ...messages.errors import NOT_JSON
from .record import CONSTRAINED, IMAGES, INVALID, NO_BASE, OK, PARTIAL, TURNS, Base, CallRecord, Captured, pack_ids

_KEPT = 8  # branches of a session that are known at the same time; calls of older ones are stored whole
_TAIL = 24  # bytes that are compared before a long text is hashed
_Pairs = tuple[tuple[int, int], ...]
# A content part that is no text. In a string of JSON its quotes would be escaped.
_MEDIA = re.compile(rb'"(?:image_url|input_image|image_embeds|video_url|audio_url|input_audio)"')
_ids = msgspec.json.Decoder(list[int]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Known(NamedTuple):
    """A text of an earlier call. ``units``: the number of its token ids or messages.

    ``choices`` has the size and the hash of the ids of each choice. ``media``: it has images, sound, or video.
    """

    call_id: str
    size: int
    tail: bytes
    digest: int
    units: int
    choices: _Pairs
    media: bool

    def begins(self, text: memoryview) -> bool:
        """Return True if this text is the beginning of another, up to the end of an item."""
        size = self.size
        if text[size - len(self.tail) : size] != self.tail or bytes(text[size : size + 1]) not in (b"", b","):
            return False
        return hash(bytes(text[:size])) == self.digest


class Texts:
    """The texts of a session with which a later call may begin.

    ``request`` is a hash of the last call's other fields, and the call in which they are stored.
    """

    def __init__(self) -> None:
        self.prompts: list[Known] = []
        self.messages: list[Known] = []
        self.request: tuple[int, str] | None = None


def complete(
    record: CallRecord,
    captured: Captured,
    messages: bytes | msgspec.Raw,
    texts: Texts,
    *,
    published: tuple[int | None, int | None],
    stream: bool,
) -> None:
    """Put a reply into the record of its call, whose texts are then known.

    Args: ``messages`` of the request are JSON, as are its other fields in the record. ``published`` are the weight versions of
    when the call was sent and of when its reply was complete.
    """
    record.finished_s = time.time()
    if captured.prompt and record.status in (OK, PARTIAL, INVALID):
        try:
            record.prompt_base, record.prompt_ids = _prompt(texts.prompts, captured, record.call_id)
        except CaptureError as e:
            captured.problem, record.status = str(e), INVALID
    text = memoryview(messages)
    record.messages_base, record.messages, media = _messages(texts.messages, text, record.call_id)
    if media and captured.untrainable in (None, CONSTRAINED):
        captured.untrainable = IMAGES
    digest = hash(record.request)
    if texts.request is not None and texts.request[0] == digest:
        record.request_of, record.request = texts.request[1], b""
    elif record.request:  # a refused request has none
        texts.request = (digest, record.call_id)
    if captured.untrainable is not None:
        for choice in captured.choices:
            choice.untrainable = captured.untrainable
    record.weight_version_first, record.weight_version_last = _versions(captured, *published, stream=stream)
    record.choices, record.model, record.usage = captured.choices, captured.model, captured.usage
    record.reply_id = captured.reply_id
    record.parent_turn, record.branch_reason = captured.parent_turn, captured.branch_reason
    if record.status not in TURNS:
        record.error_type = record.error_type or record.status
    record.error = record.error or captured.problem


def pack_long_prompt(texts: Texts, captured: Captured) -> None:
    """Pack the ids of a prompt that continues no earlier call, for `complete`. For threads: 600,000 ids take 80 ms."""
    text = memoryview(captured.prompt or b"")[:-1]
    if _beginning(texts.prompts, text) is None:
        with suppress(CaptureError):  # `complete` raises it again
            captured.prompt_ids = _packed_ids(captured.prompt or b"")


def _versions(
    captured: Captured, begun: int | None, ended: int | None, *, stream: bool
) -> tuple[int | None, int | None]:
    """Return the versions at the first and the last token of a call. Its choices are adjusted to them."""
    named = [c for c in captured.choices if c.weight_version_first is not None]
    if not named:
        return begun, ended
    first = min(choice.weight_version_first for choice in named)  # type: ignore[type-var]  # none is None
    last = max(choice.weight_version_last for choice in named)  # type: ignore[type-var]
    if stream or captured.first_named or begun is None or begun >= first:  # type: ignore[operator]
        return first, last
    for choice in named:  # one reply in one piece names the weights that ended it
        choice.weight_version_first = min(begun, choice.weight_version_first)  # type: ignore[type-var]
    return begun, last


def _beginning(texts: list[Known], text: memoryview) -> Known | None:
    """Return the longest known text with which this text begins. Texts are JSON lists without the closing bracket."""
    found, size = None, -1
    for known in reversed(texts):
        if size < known.size <= len(text) and known.begins(text):
            found, size = known, known.size
    return found


def _keep(
    texts: list[Known], after: Known | None, call_id: str, text: memoryview, units: int, choices: _Pairs, media: bool
) -> None:
    """Keep a text, in place of the one ``after`` which it begins if there are many."""
    if len(texts) >= _KEPT:
        texts.remove(texts[0] if after is None else after)
    texts.append(Known(call_id, len(text), bytes(text[-_TAIL:]), hash(bytes(text)), units, choices, media))


def _prompt(texts: list[Known], captured: Captured, call_id: str) -> tuple[Base, bytes]:
    """Return the call that a prompt continues, and the ids that it adds. Raises: CaptureError on invalid token ids."""
    text = memoryview(captured.prompt or b"")[:-1]
    known = _beginning(texts, text)
    if captured.prompt_ids is None:
        ids = _packed_ids(_new(text, known))
    else:
        ids = captured.prompt_ids[4 * (0 if known is None else known.units) :]
    base = NO_BASE
    if known is not None:
        base = Base(known.call_id, -1, known.units)
        for place, (size, digest) in enumerate(known.choices):
            if hash(ids[:size]) == digest:
                base = Base(known.call_id, place, known.units + size // 4)
                ids = ids[size:]
                break
    choices = tuple((len(c.ids), hash(c.ids)) for c in captured.choices)
    _keep(texts, known, call_id, text, base.length + len(ids) // 4, choices, False)
    return base, ids


def _new(text: memoryview, known: Known | None) -> bytes:
    """Return the list of the items after those of a known text."""
    return b"".join((text, b"]")) if known is None else b"".join((b"[", text[known.size + 1 :], b"]"))


def _packed_ids(text: bytes) -> bytes:
    """Pack a JSON list of token ids. Raises: CaptureError."""
    try:
        return pack_ids(_ids(text))
    except NOT_JSON as e:
        raise CaptureError(f"the engine's token ids are not a list of integers: {e}") from e


def _messages(texts: list[Known], text: memoryview, call_id: str) -> tuple[Base, bytes, bool]:
    """Return the call whose messages a list continues, the list of the new messages, and whether the list has media."""
    if bytes(text[:1]) != b"[":
        return NO_BASE, bytes(text), False
    text = text[:-1]
    known = _beginning(texts, text)
    new = _new(text, known)
    base = NO_BASE if known is None else Base(known.call_id, -1, known.units)
    media = (known is not None and known.media) or _MEDIA.search(new) is not None
    _keep(texts, known, call_id, text, base.length + len(_items(new)), (), media)
    return base, new, media
