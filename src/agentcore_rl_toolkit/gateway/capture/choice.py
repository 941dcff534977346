"""The tokens of one choice, while they arrive.

If an engine reports its weight version, that version counts, choice by choice. A version in an event without tokens counts only
if no other event has one, because nothing was sampled then.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CaptureError
from ...trajectory import UNFINISHED_REASONS
from .record import Captured, ChoiceRecord, pack_ids, pack_logprobs


@dataclass(slots=True, eq=False)
class ChoiceTokens:
    """Token ids, logprobs, expert routing and weight versions of a choice. ``ids`` None: the engine reports none.

    ``both_ends``: the engine named the versions of the first and of the last token. ``spans`` are pairs of first token and
    version, if weights changed on the way.
    """

    ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    experts: Any = None
    spans: list[tuple[int, int]] | None = None
    first: int | None = None
    last: int | None = None
    both_ends: bool = False
    _version_of_tokens: bool = False

    def add(self, ids: Sequence[int] | None, logprobs: Sequence[float | None] | None) -> None:
        """Add sampled tokens."""
        if ids is not None:
            self.ids = self.ids or []
            self.ids += ids
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs

    def add_version(self, version: int | str | None, *, first: int | str | None = None, tokens: bool) -> None:
        """Add the version that an engine names with a piece, of its last token.

        ``first`` is that of the choice's first token, if the engine names both ends: they replace all others. ``tokens``: the
        piece has tokens of the choice.
        """
        number, start = version_of(version), version_of(first)
        if number is None:
            return
        if start is not None:
            self.first, self.last, self.both_ends = start, number, True
        elif not self.both_ends and (tokens or not self._version_of_tokens):
            if self.first is None or tokens != self._version_of_tokens:
                self.first = number
            self.last, self._version_of_tokens = number, tokens

    def record(
        self, captured: Captured, index: int, *, finish_reason: str | None, message: bytes, parse_status: str
    ) -> ChoiceRecord:
        """Return the record of the choice. Problems of its tokens go to ``captured``."""
        ids = logprobs = experts = None
        try:
            if self.ids is not None:
                ids = pack_ids(self.ids)
                captured.has_tokens = True
            if self.experts is not None:
                experts = read_experts(self.experts)
            if ids is not None and self.logprobs is not None:
                logprobs = pack_logprobs(self.logprobs)
        except CaptureError as e:
            captured.problem = captured.problem or str(e)
        if ids is not None and (logprobs is None or len(logprobs) != len(ids)):
            counted = "no" if logprobs is None else len(logprobs) // 4
            captured.problem = (
                captured.problem or f"choice {index} has {len(ids) // 4} token ids and {counted} logprobs"
            )
            logprobs = None
        if finish_reason in UNFINISHED_REASONS:  # an engine that changes its weights may abort calls
            captured.complete = False
        captured.first_named = captured.first_named or self.both_ends
        return ChoiceRecord(
            index=index,
            ids=ids or b"",
            logprobs=logprobs,
            finish_reason=finish_reason,
            parse_status=parse_status,
            message=message,
            routed_experts=experts,
            weight_version_first=self.first,
            weight_version_last=self.last,
            weight_spans=None if self.spans is None else pack_ids([n for span in self.spans for n in span]),
        )


def read_experts(value: Any) -> bytes:
    """Return the bytes of expert routing: base64, of a numpy file (vLLM) or bare int32 (SGLang). Raises: CaptureError."""
    try:
        return binascii.a2b_base64(value, strict_mode=True)
    except (TypeError, ValueError) as e:
        raise CaptureError(f"the engine's routed_experts are not base64: {e}") from e


def version_of(value: int | str | None) -> int | None:
    """Return a weight version that is a number of 64 bits. Engines also have the word "default" for one."""
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and len(value) < 20 else None
    return value if value is not None and -(2**63) <= value < 2**63 else None
