"""The calls under way: pausing them, the weights they are sampled with, and waiting for them to end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ...messages.errors import RequestError
from ..config import Limits


class RunningCall(Protocol):
    """A model call that is under way."""

    def enter(self, stage: str, limit_s: float | None) -> None:
        """Begin a stage of the call, which has its own deadline."""

    def abort(self, error: RequestError) -> None:
        """Cancel the call."""

    def ping(self, now: float) -> None:
        """Let a silent stream show that it is alive."""


class RunningCalls:
    """The running calls of a gateway. ``waiting`` are those that a pause holds.

    ``changes`` counts the moments from which on other weights may answer running calls.
    """

    def __init__(self, limits: Limits, counters: Counter[str]) -> None:
        self.limits = limits
        self.counters = counters
        self.calls: set[RunningCall] = set()
        self.waiting: set[RunningCall] = set()
        self.paused = False
        self.weight_version: int | None = None
        self.changes = 0
        self._watchers: set[asyncio.Event] = set()  # of those who wait for a call to end, or for the pause to end

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[RunningCall]:
        return iter(self.calls)

    def discard(self, call: RunningCall) -> None:
        """The call has ended."""
        self.calls.discard(call)
        self._changed()

    def _changed(self) -> None:
        for event in self._watchers:
            event.set()

    async def _reach(self, reached: Callable[[], bool]) -> None:
        """Return when `reached()`. It is checked whenever a call begins to wait or ends, and when a pause ends."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while not reached():
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    async def until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `reached()`, but not longer than this."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._reach(reached)
        except TimeoutError:
            pass

    def publish(self, version: int) -> None:
        """Other weights answer from now on."""
        self.weight_version = version
        self.changes += 1

    # -- pausing

    async def resumed(self, call: RunningCall) -> None:
        """Hold a call that arrives during a pause. Its own time begins when the pause ends."""
        if not self.paused:
            return
        call.enter("held", self.limits.hold_s)
        self.waiting.add(call)
        self._changed()
        try:
            await self._reach(lambda: not self.paused)
        finally:
            self.waiting.discard(call)
        call.enter("sampling", self.limits.call_s)

    async def pause(self, *, in_flight: str = "finish", timeout_s: float = 60.0) -> dict[str, Any]:
        """Start no further calls. `in_flight`: "finish" waits for the running ones, "abort" ends them, "continue"
        lets them be.

        Returns how many were left running when the wait was over.
        """
        self.paused = True
        if in_flight == "abort":
            for call in self.calls - self.waiting:
                call.abort(RequestError("the policy is being updated; try again", kind="overloaded"))
        if in_flight != "continue":  # of aborted ones those are left whose record the disk is about to take
            await self.until(lambda: not self._active() or not self.paused, timeout_s)
        self.changes += bool(self._active())
        return {"paused": True, "in_flight": self._active()}

    def _active(self) -> int:
        return len(self.calls) - len(self.waiting)

    def resume(self) -> dict[str, Any]:
        self.paused = False
        started = len(self.waiting)
        self._changed()
        return {"paused": False, "started": started}
