"""A deadline for a process that does not count the time in which it could have run and no CPU was free."""

from __future__ import annotations

import time

from . import linux


class FairDeadline:
    """The deadline of a process and all below it, from now on.

    ``limit_s`` bounds the time in which it ran or waited for something other than a CPU, ``most`` times that all of it. Where the
    kernel does not say who waits for a CPU (elsewhere than on Linux) the limit is one of time as it passes.
    """

    def __init__(self, pid: int, limit_s: float, *, most: float = 10.0) -> None:
        self.pid = pid
        self.limit_s = limit_s
        self.most_s = limit_s * most
        self.took_s = self.excused_s = self._seen_s = 0.0
        self._began_s = time.monotonic()

    def passed(self) -> bool:
        """Whether it is over. Ask every second or so: what happened between two looks is known only in sum."""
        took_s, waited_s = time.monotonic() - self._began_s, linux.waited_for_cpu_s(self.pid)
        # Processes that waited side by side excuse no more than the time that has passed.
        self.excused_s += max(0.0, min(waited_s - self._seen_s, took_s - self.took_s))
        self.took_s, self._seen_s = took_s, waited_s
        return took_s - self.excused_s > self.limit_s or took_s > self.most_s

    def __str__(self) -> str:
        """The time that it had."""
        busy = f", and {self.excused_s:.0f} s in which no CPU was free" if self.excused_s >= 1 else ""
        return f"{self.took_s - self.excused_s:.3g} s{busy}"
