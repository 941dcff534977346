"""Process ids across a pid namespace: a confined template names its children by numbers that mean nothing outside."""

from __future__ import annotations

from ..._servers.procfs import status
from . import linux


class Children:
    """The children of one process that is in a pid namespace below ours."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self._depth = len(_numbers(parent))
        self._known: dict[int, int] = {}  # by their number in the namespace

    def outer(self, inner: int) -> int | None:
        """A new child's process id here. None where the kernel does not tell, or it is gone."""
        alive = linux.children(self.parent)
        met = self._known.get(inner)  # while one that was started before it was looked for
        if met in alive and _numbers(met)[self._depth - 1 : self._depth] == [inner]:
            return met
        known = set(self._known.values())
        for pid in reversed(alive):
            if pid not in known:
                numbers = _numbers(pid)
                if len(numbers) >= self._depth:
                    self._known[numbers[self._depth - 1]] = pid
                if self._known.get(inner) == pid:
                    return pid
        return None

    def forget(self, outer: int | None) -> None:
        """It is over."""
        for inner, pid in self._known.items():
            if pid == outer:
                del self._known[inner]
                return


def _numbers(pid: int) -> list[int]:
    """A process's ids from our namespace down to its own."""
    return [int(word) for word in status(pid, "NSpid") or ()]
