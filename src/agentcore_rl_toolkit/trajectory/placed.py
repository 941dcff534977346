"""A turn at its place in the forest of a session's turns."""

from __future__ import annotations

from .turn import Turn


class Placed:
    """A trainable turn, what it goes on from, and why it is not trained, where it is not.

    ``reason`` is why it does not go on from the turn before it, ``rival`` the earlier turn that it leaves there. ``superseded``:
    a retry that the agent never used, or an answer that it never got. ``side`` is one of `selection.SIDE_CALLS`. ``carries``: it
    or a turn that goes on from it is trained.
    """

    __slots__ = (
        *("carries", "children", "continues", "parent", "position", "reason", "rival", "side", "superseded", "turn"),
        "undelivered",
    )

    def __init__(self, turn: Turn, position: int, reason: str | None, rival: Turn | None) -> None:
        self.turn = turn
        self.position = position
        self.reason = reason
        self.rival = rival
        self.parent: Placed | None = None
        self.children: list[Placed] = []
        self.continues: Placed | None = None  # after a compaction: the turn whose conversation it is
        self.superseded = False
        self.undelivered = False
        self.side: str | None = None
        self.carries = False
