"""The calls under way: pausing them, the weights they are sampled with, and waiting for them to end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ...messages.errors import RequestError
from ..config import Limits
from .states import State


class RunningCall(Protocol):
    """A call that is under way, as its engine side and its transport see it."""

    deadline: float | None
    state: State

    @property
    def ended(self) -> bool: ...
    def become(self, state: State) -> None: ...
    def go(self) -> None:
        """Off to a server, or wait with everybody else while the gateway is paused."""

    def route(self) -> None:
        """Choose a server and send the request to it."""

    def take(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def forget(self) -> None: ...
    def weights_change(self) -> None: ...
    def pass_error(self, status: int, body: bytes) -> None: ...
    def fail(self, error: RequestError) -> None: ...
    def abort(self, error: RequestError) -> None: ...
    def broke(self, error: BaseException) -> None: ...
    def comment(self, text: bytes) -> bool:
        """Write a comment line to an agent that waits for a stream. False: none waits any more."""


class RunningCalls:
    """The running calls of a gateway. ``waiting`` are the calls that a pause holds.

    ``changes`` counts how often other weights were published, or a change under running calls began or ended.
    """

    def __init__(self, limits: Limits, counters: Counter[str]) -> None:
        self.limits = limits
        self.counters = counters
        self.calls: set[RunningCall] = set()
        self.waiting: list[RunningCall] = []
        self.paused = False
        self.weight_version: int | None = None
        self.changing = False  # whether weights may be changed under running calls
        self.changes = 0
        self._ended: set[asyncio.Event] = set()  # of those who wait for a call to end

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[RunningCall]:
        return iter(self.calls)

    def discard(self, call: RunningCall) -> None:
        """The call has ended."""
        self.calls.discard(call)
        self._wake()

    def _wake(self) -> None:
        for event in self._ended:
            event.set()

    def expire(self, now: float) -> None:
        """End the calls that have taken too long."""
        for call in [c for c in self.calls if c.deadline is not None and now > c.deadline]:
            self.counters["deadlines"] += 1
            if call in self.waiting:
                call.abort(RequestError("the policy is still being updated; try again", kind="rate_limit"))
            else:
                call.abort(RequestError(f"the call took longer than {self.limits.call_s:g} s", kind="timeout"))

    def deadline(self) -> float | None:
        """Until when a call that is sent now may take."""
        return None if self.limits.call_s is None else time.monotonic() + self.limits.call_s

    async def until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `reached()`, looked at whenever a call ends."""
        changed = asyncio.Event()
        self._ended.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            pass
        finally:
            self._ended.discard(changed)

    # -- weights

    @property
    def sampling(self) -> int | None:
        """The version of the tokens that arrive now; None: not known."""
        return None if self.changing else self.weight_version

    def publish(self, version: int) -> None:
        """Other weights answer from now on."""
        self._change(changing=False)
        self.weight_version = version

    def _change(self, *, changing: bool) -> None:
        self.changing = changing
        self.changes += 1
        for call in self.calls:
            call.weights_change()

    # -- pausing

    def hold(self, call: RunningCall) -> None:
        """Let a call wait that arrives during a pause."""
        call.deadline = time.monotonic() + self.limits.hold_s  # its own time begins when it is sent
        self.waiting.append(call)

    async def pause(self, *, in_flight: str = "finish", timeout_s: float = 60.0) -> dict[str, Any]:
        """Start no further calls. `in_flight`: "finish" waits for the running ones, "abort" ends them, "continue"
        lets them be.

        Returns how many were left running when the wait was over.
        """
        self.paused = True
        if in_flight == "abort":
            for call in [c for c in self.calls if c not in self.waiting]:
                call.abort(RequestError("the policy is being updated; try again", kind="overloaded"))
        if in_flight != "continue":  # of aborted ones those are left whose record the disk is about to take
            await self.until(lambda: not self._active() or not self.paused, timeout_s)
        if self._active() and self.paused:
            self._change(changing=True)
        return {"paused": True, "in_flight": self._active()}

    def _active(self) -> int:
        return len(self.calls) - sum(not call.ended for call in self.waiting)

    def resume(self) -> dict[str, Any]:
        self.paused = False
        if self.changing:
            self._change(changing=False)
        self._wake()
        waiting, self.waiting = self.waiting, []
        started = 0
        for call in waiting:
            if not call.ended:
                call.deadline = self.deadline()
                call.route()
                started += 1
        return {"paused": False, "started": started}
