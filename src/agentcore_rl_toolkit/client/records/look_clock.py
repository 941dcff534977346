"""A clock by which silence is counted: it stands still while nobody could look."""

from __future__ import annotations

LATE = 2.0  # a look may come after twice its pause; what it is later than that was no silence


class LookClock:
    """Seconds in which looks came about when they were due.

    A client without a CPU, a stopped process, a blocked event loop or a frozen machine does not look, and where all runs on one
    machine its agents had no CPU either. Such time is left out. Each look adds its pause at least, so a dead session is found
    however busy the machine is. Units: seconds; ``now_s`` is a monotonic time.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self.left_out_s = 0.0

    def look(self, now_s: float, pause_s: float) -> None:
        """A look begins; it was due `pause_s` after the one before began."""
        if self._last_s is not None:
            self.left_out_s += max(0.0, now_s - self._last_s - LATE * pause_s)
        self._last_s = now_s

    def rest(self) -> None:
        """Nobody is looked for any more: the time until the next look is not late."""
        self._last_s = None

    def at(self, now_s: float) -> float:
        """This clock's time."""
        return now_s - self.left_out_s
