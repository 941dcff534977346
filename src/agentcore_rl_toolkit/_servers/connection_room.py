"""How many connections a server holds, and which of them it closes when there are too many. No I/O.

Theory of operation. An open connection costs a file, and files are what a server runs out of. Connections on which a request is
under way are never closed for that. Of the others the longest idle go first, those that never sent a request before all
others, and those of the peer that has the most; as long as there is any room, none that is new or was used before: its next
request may be on its way. On loopback all users share one address, so it is idleness that decides there; another machine
gets three quarters of the room at most. Choosing means looking at all connections, so many are chosen at once.
"""

from __future__ import annotations

import heapq
import resource
from collections import Counter
from collections.abc import Collection
from typing import Protocol, TypeVar

from .open_files import MAX_OPEN_FILES

AT_ONCE = 16  # a sixteenth of the room is made free
GRACE_S = 10.0  # a client with hundreds of agents on a busy machine sends its first request seconds after it connected
NOBODY_S = 0.1  # how long nobody is looked for again after nobody was found
LOOPBACK = ("127.", "::1", "::ffff:127.")
SMALLEST = 32


class Connection(Protocol):
    """What is looked at. ``idle_since``: None while a request is under way. ``used``: it had a whole request before."""

    @property
    def address(self) -> str: ...
    @property
    def idle_since(self) -> float | None: ...
    @property
    def used(self) -> bool: ...


C = TypeVar("C", bound=Connection)


def default_limit() -> int:
    """Half of the files this process may open: the other half is for what the requests need."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(SMALLEST, (MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft) // 2)


class ConnectionRoom:
    """Room for ``limit`` connections, and for ``most`` where all have a request under way.

    `opened` and `closed` are called for each; `make_room` after `opened`, when that says so or there are more than ``limit``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.most = limit + limit * 3 // 4
        self._of_peer: Counter[str] = Counter()
        self._nobody_until = [
            0.0,
            0.0,
        ]  # until when there is nobody to close: while there is room, and when there is none

    def opened(self, peer: str) -> bool:
        """Count a connection. Returns whether there are too many of its peer."""
        self._of_peer[peer] += 1
        return self._crowds(peer, self.limit)

    def closed(self, peer: str) -> None:
        self._of_peer[peer] -= 1
        if self._of_peer[peer] <= 0:
            del self._of_peer[peer]

    def make_room(self, newcomer: C, everyone: Collection[C], now: float) -> list[C]:
        """Which connections to close for the new one; it itself when none can be."""
        full = len(everyone) > self.most or self._crowds(newcomer.address, self.most)
        if now < self._nobody_until[full]:
            return [newcomer] if full else []
        crowd = newcomer.address
        if not self._crowds(crowd, self.limit):
            crowd = self._of_peer.most_common(1)[0][0]
        idle = [
            (c.used, since, id(c), c) for c in everyone if c is not newcomer and (since := c.idle_since) is not None
        ]
        of_crowd = [entry for entry in idle if entry[3].address == crowd]
        if not of_crowd and not self._crowds(newcomer.address, self.limit):
            of_crowd = idle
        strangers = [entry for entry in of_crowd if not entry[0] and now - entry[1] >= GRACE_S]
        chosen = strangers or (of_crowd if full else [])
        if not chosen:
            self._nobody_until[full] = now + NOBODY_S
            return [newcomer] if full else []
        return [c for *_, c in heapq.nsmallest(max(1, self.limit // AT_ONCE), chosen)]

    def _crowds(self, peer: str, limit: int) -> bool:
        """Whether one peer has more than three quarters; those of this machine have one address together."""
        return self._of_peer[peer] > limit - limit // 4 and not peer.startswith(LOOPBACK)
