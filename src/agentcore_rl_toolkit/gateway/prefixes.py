"""Finding out, cheaply, that a text starts with one seen before.

A session's prompts grow: turn k+1's is turn k's with something appended. Keeping the earlier text to compare with
would cost memory in proportion to all contexts of all sessions, so only its length, its hash and its last bytes are
kept. The last bytes rule out almost every text that does not match; the hash (Python's keyed 64-bit SipHash, 4 GB/s)
decides. Work per lookup is one hash over the shared part and no work at all for texts that differ.
"""

from __future__ import annotations

_TAIL = 24
_KEEP = 8  # branches of a session that are followed at the same time; an older one costs disk space, not correctness


class Seen:
    """A text seen earlier: which record it belongs to (``ordinal``) and what it means there (``units``)."""

    __slots__ = ("choices", "digest", "length", "ordinal", "tail", "units")

    def __init__(self, text: bytes, ordinal: int, units: int, choices: tuple[tuple[int, int], ...] = ()) -> None:
        self.length = len(text)
        self.tail = text[-_TAIL:]
        self.digest = hash(text)
        self.ordinal = ordinal
        self.units = units
        self.choices = choices  # per choice of that record: (bytes of its ids, their hash)


class Prefixes:
    """The texts a session may go on from, latest last."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: list[Seen] = []

    def longest(self, text: bytes) -> Seen | None:
        """The longest remembered text that `text` starts with, or None."""
        best: Seen | None = None
        size = len(text)
        for seen in self._seen:
            length = seen.length
            if (
                length <= size
                and (best is None or length >= best.length)
                and text[max(0, length - _TAIL) : length] == seen.tail
                and hash(text[:length]) == seen.digest
            ):
                best = seen
        return best

    def add(self, seen: Seen, *, instead_of: Seen | None = None) -> None:
        """Remember a text; the one it grew from need not be kept."""
        kept = self._seen
        if instead_of is not None and len(kept) >= _KEEP and instead_of in kept:
            kept.remove(instead_of)
        kept.append(seen)
        if len(kept) > _KEEP:
            del kept[0]
