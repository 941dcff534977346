"""Sorted keys of one bucket, in blocks: any key found, inserted or removed in microseconds, with hundreds of thousands held."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

_BLOCK = 2000  # split at twice this; a block's insert moves at most 32 KB of pointers


class SortedKeys:
    """Unique strings in code point order, which for UTF-8 is byte order, the order of S3 listings."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        ordered = sorted(set(keys))
        self._blocks = [ordered[i : i + _BLOCK] for i in range(0, len(ordered), _BLOCK)]
        self._last = [block[-1] for block in self._blocks]

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, key: str) -> None:
        """Insert a key; one that is there already stays once."""
        if not self._blocks:
            self._blocks, self._last = [[key]], [key]
            return
        at = min(bisect.bisect_left(self._last, key), len(self._blocks) - 1)
        block = self._blocks[at]
        place = bisect.bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return
        block.insert(place, key)
        self._last[at] = block[-1]
        if len(block) > 2 * _BLOCK:
            self._blocks[at : at + 1] = [block[:_BLOCK], block[_BLOCK:]]
            self._last[at : at + 1] = [block[_BLOCK - 1], block[-1]]

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        at = bisect.bisect_left(self._last, key)
        if at == len(self._blocks):
            return
        block = self._blocks[at]
        place = bisect.bisect_left(block, key)
        if block[place] != key:
            return
        del block[place]
        if block:
            self._last[at] = block[-1]
        else:
            del self._blocks[at], self._last[at]

    def iterate(self, start: str, *, inclusive: bool) -> Iterator[str]:
        """Keys from ``start`` on (or after it), in order. The keys must not change while it is used."""
        at = bisect.bisect_left(self._last, start)
        if at == len(self._blocks):
            return
        block = self._blocks[at]
        place = bisect.bisect_left(block, start) if inclusive else bisect.bisect_right(block, start)
        yield from block[place:]
        for block in self._blocks[at + 1 :]:
            yield from block

    def first_not_below(self, start: str) -> str | None:
        """The smallest key >= ``start``, or None."""
        return next(self.iterate(start, inclusive=True), None)
