"""Turning a finished call into its record."""

from __future__ import annotations

import time
import zlib
from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.wire.passthrough import Fields
from .prefix_index import TRANSLATED, Prefixes, Seen
from .record import INVALID, NO_BASE, OK, PARTIAL, TURNS, Base, CallRecord, Captured
from .token_numbers import parse_ids

_to_json = msgspec.json.Encoder().encode


class Texts:
    """The texts of a session that a later call may go on from.

    ``request`` is the hash of the last call's other fields, and the call that has them stored.
    """

    __slots__ = ("messages", "prompts", "request", "translated")

    def __init__(self) -> None:
        self.prompts = Prefixes()
        self.messages = Prefixes()
        self.translated = Prefixes(TRANSLATED)  # in the agent's own dialect, where that is not the servers'
        self.request: tuple[int, str] | None = None

    def clear(self) -> None:
        self.prompts.clear()
        self.messages.clear()
        self.translated.clear()
        self.request = None


def build(
    status: str,
    captured: Captured,
    *,
    texts: Texts,
    call_id: str,
    fields: Fields,
    long: tuple[bytes, int, Seen | None] | None,
    versions: tuple[int | None, int | None],
    **about: Any,
) -> CallRecord:
    """The record of a call; ``about`` are further fields. ``texts`` learns those that a later call may go on from.
    ``long`` is a message list's JSON without its closing bracket, its CRC-32, and what it was found
    to begin with, where the fields lack it.
    """
    prompt_base, prompt_ids = NO_BASE, b""
    if captured.prompt and status in (OK, PARTIAL, INVALID):
        try:
            prompt_base, prompt_ids = _prompt(texts, captured, call_id)
        except CaptureError as e:
            captured.problem, status = str(e), INVALID
    messages_base, messages = NO_BASE, b""
    if long is not None:
        messages_base, messages = _messages(texts, long[0], call_id, *long[1:])
    elif (history := fields.pop("messages", None)) is not None:
        messages = bytes(history)
        if messages[-1:] == b"]":
            messages_base, messages = _messages(texts, messages[:-1], call_id)
    rest = _to_json(fields)
    digest = hash(rest)
    request_of: str | None = None
    if texts.request is not None and texts.request[0] == digest:
        request_of, rest = texts.request[1], b""
    elif fields:  # a refused request has none
        texts.request = (digest, call_id)
    if captured.untrainable is not None:
        for choice in captured.choices:
            choice.untrainable = captured.untrainable
    good = status in TURNS
    return CallRecord(
        call_id=call_id,
        status=status,
        model=captured.model,
        finished_s=time.time(),
        weight_version_first=versions[0],
        weight_version_last=versions[1],
        prompt_base=prompt_base,
        prompt_ids=prompt_ids,
        messages_base=messages_base,
        messages=messages,
        choices=captured.choices,
        error_type=None if good else status,
        error=captured.problem or (captured.error.decode("utf-8", "replace") if captured.error else None),
        request=rest,
        request_of=request_of,
        reply_id=captured.reply_id,
        usage=captured.usage,
        parent_turn=captured.parent_turn,
        branch_reason=captured.branch_reason,
        **about,
    )


def _prompt(texts: Texts, captured: Captured, call_id: str) -> tuple[Base, bytes]:
    """The new part of a prompt, and the call that it continues."""
    text = captured.prompt or b""
    seen = texts.prompts.longest(text)
    if seen is not None and text[seen.length : seen.length + 1] not in (b"", b","):
        seen = None  # the match ended inside a number
    base, ids = NO_BASE, parse_ids(text if seen is None else text[seen.length + 1 :])
    if seen is not None:
        base = Base(seen.call_id, -1, seen.units)
        for place, (size, digest) in enumerate(seen.choices):
            if size <= len(ids) and hash(ids[:size]) == digest:
                base = Base(seen.call_id, place, seen.units + size // 4)
                ids = ids[size:]
                break
    units = base.length + len(ids) // 4
    choices = tuple((len(c.ids), hash(c.ids)) for c in captured.choices)
    texts.prompts.add(Seen(text, call_id, units, choices), instead_of=seen)
    return base, ids


def _messages(
    texts: Texts, text: bytes, call_id: str, crc: int | None = None, found: Seen | None = None
) -> tuple[Base, bytes]:
    """The new part of a message list (without its closing bracket), and the call that it continues."""
    seen = texts.messages.longest(text, found=found)
    base, new = (NO_BASE, text) if seen is None else (Base(seen.call_id, -1, seen.length), text[seen.length :])
    if crc is None:
        crc = zlib.crc32(new, seen.crc if seen is not None else 0)
    texts.messages.add(Seen(text, call_id, 0, crc=crc), instead_of=seen)
    return base, b"".join((new, b"]"))
