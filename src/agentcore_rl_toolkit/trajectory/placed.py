"""A turn at its place in the forest of a session's turns."""

from __future__ import annotations

from dataclasses import dataclass, field

from .turn import Turn


@dataclass(slots=True, eq=False)
class Placed:
    """A trainable turn, what it goes on from, and why it is not trained, where it is not.

    ``reason`` is why it does not go on from the turn before it, ``rival`` the earlier turn that it leaves there. ``superseded``:
    a retry that the agent never used, or an answer that it never got. ``side`` is one of `selection.SIDE_CALLS`. ``carries``: it
    or a turn that goes on from it is trained.
    """

    turn: Turn
    position: int
    reason: str | None
    rival: Turn | None
    parent: Placed | None = None
    children: list[Placed] = field(default_factory=list)
    continues: Placed | None = None  # after a compaction: the turn whose conversation it is
    superseded: bool = False
    undelivered: bool = False
    side: str | None = None
    carries: bool = False
