"""Finding out, cheaply, that a text starts with one seen before.

A session's prompts grow: turn k+1's is turn k's with something appended. The texts of the sessions that were active
last are kept and compared as they are (memory speed, no hashing), up to a budget for the whole process. Of older ones
only length, last bytes and a hash remain: the last bytes rule out almost every text that does not match, the hash
(Python's keyed 64-bit SipHash) decides.
"""

from __future__ import annotations

from collections import OrderedDict

_TAIL = 24
_KEEP = 8  # branches of a session that are followed at the same time; an older one costs disk space, not correctness
_LONG = 32 * 2**10  # hashing a longer text every turn would make turns dearer as the session grows
BUDGET_BYTES = 48 * 2**20


class Seen:
    """A text seen earlier: which call it belongs to (``call_id``) and what it means there (``units``).

    ``choices`` holds, per choice of that record, the bytes of its ids and their hash; ``crc`` is the CRC-32 of the text
    where one is kept.
    """

    __slots__ = ("call_id", "choices", "crc", "digest", "length", "tail", "text", "units")

    def __init__(
        self, text: bytes, call_id: str, units: int, choices: tuple[tuple[int, int], ...] = (), crc: int = 0
    ) -> None:
        self.length = len(text)
        self.crc = crc
        self.text: bytes | None = text
        self.tail = b""
        self.digest = 0
        self.call_id = call_id
        self.units = units
        self.choices = choices

    def begins(self, text: bytes, start: int = 0) -> bool:
        """Whether `text` begins with this one at `start`."""
        if self.text is not None:
            return text.startswith(self.text, start)
        end = start + self.length
        return text[max(start, end - _TAIL) : end] == self.tail and hash(text[start:end]) == self.digest

    def fold(self) -> None:
        """Keep only what is needed to recognise the text."""
        if self.text is not None:
            self.tail, self.digest = self.text[-_TAIL:], hash(self.text)
            self.text = None


class Budget:
    """The texts kept whole, least recently added first."""

    def __init__(self, limit: int = BUDGET_BYTES) -> None:
        self.limit = limit
        self.held = 0
        self._kept: OrderedDict[int, Seen] = OrderedDict()

    def keep(self, seen: Seen) -> None:
        if seen.length > self.limit // 8:
            seen.fold()
            return
        self._kept[id(seen)] = seen
        self.held += seen.length
        while self.held > self.limit:
            _, oldest = self._kept.popitem(last=False)
            self.held -= oldest.length
            oldest.fold()

    def release(self, seen: Seen) -> None:
        """The text is no longer needed at all."""
        if self._kept.pop(id(seen), None) is not None:
            self.held -= seen.length

    def drop(self, seen: Seen) -> None:
        """Keep the text no longer whole."""
        if self._kept.pop(id(seen), None) is not None:
            self.held -= seen.length
            seen.fold()


_budget = Budget()
TRANSLATED = Budget(32 * 2**20)  # of texts that are kept with what they mean, which takes three times their size


class Prefixes:
    """The texts a session may go on from, latest last."""

    __slots__ = ("_budget", "_seen")

    def __init__(self, budget: Budget = _budget) -> None:
        self._budget = budget
        self._seen: list[Seen] = []

    def longest(self, text: bytes, start: int = 0, *, found: Seen | None = None) -> Seen | None:
        """The longest remembered text that `text` has at `start`, or None. One `found` there before is not compared again."""
        best: Seen | None = None
        size = len(text) - start
        for seen in reversed(self._seen):
            length = seen.length
            longer = length <= size and (best is None or length > best.length)
            if longer and (seen is found or seen.begins(text, start)):
                best = seen
        return best

    def add(self, seen: Seen, *, instead_of: Seen | None = None) -> None:
        """Remember a text. The one it grew from is only needed by branches:

        it is kept, but not as a whole, if it is short.
        """
        kept = self._seen
        if instead_of is not None:
            if instead_of.length > _LONG or len(kept) >= _KEEP:
                kept.remove(instead_of)
                self._budget.release(instead_of)
            else:
                self._budget.drop(instead_of)
        kept.append(seen)
        self._budget.keep(seen)
        if len(kept) > _KEEP:
            self._budget.release(kept.pop(0))

    def clear(self) -> None:
        for seen in self._seen:
            self._budget.release(seen)
        self._seen = []
