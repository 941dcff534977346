"""One page of a listing: which keys and which common prefixes, and where to go on. Pure; the wire formats are in `answers`."""

from __future__ import annotations

from dataclasses import dataclass

from sortedcontainers import SortedList

_LARGEST = "\U0010ffff"


@dataclass(frozen=True, kw_only=True)
class Page:
    """``entries`` in order: (name, is_prefix). ``last`` is where the next page starts after, None when this is the last."""

    entries: list[tuple[str, bool]]
    last: str | None


def page(keys: SortedList, *, prefix: str, delimiter: str, after: str, limit: int) -> Page:
    """At most ``limit`` keys and common prefixes that sort after ``after``; keys in code point order, UTF-8's byte order.

    A common prefix that ``after`` lies in has been listed (or passed over) already and is not listed again, so that the last
    entry of a page, key or prefix, is always a valid place to go on from.
    """
    entries: list[tuple[str, bool]] = []
    if limit == 0:
        return Page(entries=entries, last=None)
    start, inclusive = (prefix, True) if prefix > after else (after, False)
    if delimiter and after.startswith(prefix):
        end = after.find(delimiter, len(prefix))
        if end >= 0:
            start, inclusive = _beyond(after[: end + len(delimiter)]), True
    last = ""
    while True:
        moved = False
        for key in keys.irange(start, inclusive=(inclusive, True)):
            if not key.startswith(prefix):
                return Page(entries=entries, last=None)
            if len(entries) == limit:
                return Page(entries=entries, last=last)
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                entries.append((key, False))
                last = key
                continue
            last = key[: end + len(delimiter)]
            entries.append((last, True))
            start, inclusive, moved = _beyond(last), True, True
            break
        if not moved:
            return Page(entries=entries, last=None)


def _beyond(prefix: str) -> str:
    """The smallest string that sorts after every string with this prefix.

    Incrementing the last character; one that cannot be incremented is dropped first, and surrogates are stepped over.
    """
    while prefix and prefix[-1] == _LARGEST:
        prefix = prefix[:-1]
    if not prefix:
        return _LARGEST * 400  # longer than any key of 1,024 bytes made of the largest character
    following = ord(prefix[-1]) + 1
    return prefix[:-1] + chr(0xE000 if 0xD800 <= following <= 0xDFFF else following)
