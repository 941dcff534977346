"""The sessions that were closed, in order, for trainers that ask what is new."""

from __future__ import annotations

import secrets

KEPT = 200_000  # ids, about 20 MB; whoever reads along is never that far behind
_PLACES = 32  # bits of a place that count; those above name the list. Together they fit into a JSON number (2**53)


class FinishedSessions:
    """An endless list of which the last `KEPT` to twice as many are kept. Places in it never change their meaning.

    A place names its list as well, by a random number: whoever comes with a place in the list of another run of the
    gateway gets everything from the start, rather than nothing of what it has missed.
    """

    def __init__(self, kept: int = KEPT, *, name: int | None = None) -> None:
        self._kept = kept
        self._name = 1 + secrets.randbelow(2**20) if name is None else name
        self._forgotten = 0
        self._ids: list[str] = []

    def __len__(self) -> int:
        return self._forgotten + len(self._ids)

    def append(self, session_id: str) -> None:
        self._ids.append(session_id)
        if len(self._ids) > 2 * self._kept:
            del self._ids[: self._kept]
            self._forgotten += self._kept

    def _at(self, place: int) -> int:
        at = place & (1 << _PLACES) - 1
        return at if place >> _PLACES == self._name and at <= len(self) else 0

    def beyond(self, after: int) -> bool:
        """Whether there is anything from place `after` on."""
        return self._at(after) < len(self)

    def since(self, after: int, limit: int) -> tuple[list[str], int]:
        """Up to `limit` ids from place `after` on (later, where those are forgotten), and the place to go on from."""
        at = max(self._at(after), self._forgotten)
        start = at - self._forgotten
        ids = self._ids[start : start + limit]
        return ids, self._name << _PLACES | at + len(ids)
