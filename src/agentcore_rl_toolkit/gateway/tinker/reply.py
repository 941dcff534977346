"""Where an answer of Tinker ends: the service is not sent stop strings (`engines.tinker`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...messages.dialects.canonical import STOP
from ..engines import Piece


def cut(piece: Piece, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
    """End a choice with the token that completes a stop string, as an engine that knows these would have."""
    ids, logprobs = piece.ids, piece.logprobs
    if not stops or logprobs is None or len(logprobs) != len(ids):
        return
    text = decode(ids)
    found = [stop for stop in stops if stop in text]
    if not found:
        return
    first = min(found, key=text.find)
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if first in decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    piece.ids, piece.logprobs = ids[:low], logprobs[:low]
    piece.finish_reason, piece.stop_sequence = STOP, first
