"""Both means of a validation. verl's own is over its rows, and a rollout that agent or infrastructure failed has none."""

from __future__ import annotations

import threading
from dataclasses import replace

from ..collection.groups import Group, summarize


class Validation:
    """Puts a validation together from its prompts as they end, in any order. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for = 0
        self._groups: list[Group] = []

    def begin(self, prompts: int) -> None:
        """So many more prompts are on their way."""
        with self._lock:
            self._waited_for += prompts

    def ended(self, group: Group | None) -> str | None:
        """One prompt is over; None: without rollouts. Returns both means once it was the last one of those under way."""
        with self._lock:
            if group is not None:
                # Without tokens and records: a validation may have thousands of rollouts.
                light = [replace(r, trajectory=None, capture=None, record=None) for r in group.rollouts]
                self._groups.append(replace(group, rollouts=light))
            self._waited_for -= 1
            if self._waited_for > 0:
                return None
            stats, self._groups = summarize(self._groups), []
        failed = ", ".join(f"{n} {cause}" for cause, n in sorted(stats.causes.items()))
        return f"{stats.described()}; failures: {failed}" if failed else stats.described()
