"""The content of one reply, as the capture read it."""

from __future__ import annotations

import msgspec

from .record import ChoiceRecord


class Captured(msgspec.Struct):
    """One reply, understood. ``prompt`` is the JSON text of the prompt ids without its brackets, None when the engine
    gave none.

    ``complete`` is False when a choice has no finish reason, ``problem`` says why the tokens cannot be trained on.
    ``plain`` is the body of a whole reply with null for token ids and logprobs.
    """

    choices: list[ChoiceRecord]
    prompt: bytes | None = None
    reply_id: str | None = None
    model: str | None = None
    weight_version_first: int | None = None
    weight_version_last: int | None = None
    usage: bytes | None = None
    complete: bool = True
    problem: str | None = None
    error: bytes | None = None
    has_tokens: bool = False
    parent_turn: str | None = None
    branch_reason: str | None = None
    plain: bytes | None = None
    untrainable: str | None = None  # why it must not be trained on, though its tokens are whole
    first_named: bool = False  # whether the engine named the first token's version too, not only the one that ended
