"""The sessions that were closed, in order, for trainers that ask what is new."""

from __future__ import annotations

KEPT = 200_000  # ids, about 20 MB; whoever reads along is never that far behind


class FinishedSessions:
    """An endless list of which the last `KEPT` to twice as many are kept. Places in it never change their meaning."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._forgotten = 0
        self._ids: list[str] = []

    def __len__(self) -> int:
        return self._forgotten + len(self._ids)

    def append(self, session_id: str) -> None:
        self._ids.append(session_id)
        if len(self._ids) > 2 * self._kept:
            del self._ids[: self._kept]
            self._forgotten += self._kept

    def since(self, after: int, limit: int) -> tuple[list[str], int]:
        """Up to `limit` ids from place `after` on (later, where those are forgotten), and the place to go on from."""
        start = max(0, after - self._forgotten)
        ids = self._ids[start : start + limit]
        return ids, max(after, self._forgotten) + len(ids)
