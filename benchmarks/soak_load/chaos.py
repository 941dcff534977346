"""What is done to the stack while it works, in an order that a seed decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .stack import CLOCKS, Stack

ROLES = ("runtime", "template", "guardian", "gateway", "model", "trainer", "session")
OFTEN = ("session", "session", "model", "gateway")  # once more in every round
CLOCK_STEPS_S = (3600, -7200, 86_400, -600)
DISK_FULL_S = 2.5
STOPPED_S = (0.2, 2.5)
Event = tuple[str, str, float]  # what, whom, an argument


def plan(seed: int, rounds: int) -> list[Event]:
    """Every round kills and stops every role and steps one clock, in an order of its own."""
    rng = random.Random(seed)
    events: list[Event] = []
    for number in range(rounds):
        clock = CLOCKS[number % len(CLOCKS)]
        deck: list[Event] = [("kill", role, 0.0) for role in (*ROLES, *OFTEN)]
        deck += [("stop", role, rng.uniform(*STOPPED_S)) for role in ROLES]
        deck += [("clock", clock, float(rng.choice(CLOCK_STEPS_S)))]
        rng.shuffle(deck)
        events += [*deck, ("clock", clock, 0.0)]
    return events


class Chaos:
    """``counts`` is what was really done: nobody is there to be killed where a process is just being started."""

    def __init__(
        self, stack: Stack, events: list[Event], rounds: int, interval_s: float, progress: Callable[[], float]
    ) -> None:
        self.stack, self.events, self.rounds = stack, events, rounds
        self.interval_s, self.progress = interval_s, progress
        self.counts: Counter[str] = Counter()
        self.without_disk = False
        self.log: list[str] = []

    async def run(self) -> None:
        """Do it all, or until cancelled. Events come in equal distances, those of the first round faster if the rollouts are."""
        tasks = [] if self.without_disk else [asyncio.create_task(self._fill_twice())]
        try:
            first_round = len(self.events) / self.rounds
            for number, (what, whom, argument) in enumerate(self.events):
                due_s = time.monotonic() + self.interval_s
                while time.monotonic() < due_s and self.progress() < 0.9 * (number + 1) / first_round:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                tasks.append(asyncio.create_task(self._do(what, whom, argument)))
                tasks = [task for task in tasks if not task.done()]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _do(self, what: str, whom: str, argument: float) -> None:
        self._note(f"{what} {whom} {argument:g}")
        if what == "clock":
            self.stack.step_clock(whom, int(argument))
            self.counts[f"clock {whom}"] += 1
            return
        pid = await self._found(whom)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if what == "kill":
                os.kill(pid, signal.SIGKILL)
                self.counts[f"kill {whom}"] += 1
                return
            os.kill(pid, signal.SIGSTOP)
            self.counts[f"stop {whom}"] += 1
            try:
                await asyncio.sleep(argument)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def _found(self, whom: str) -> int | None:
        for _ in range(200):  # what was killed is started again after a while, and sessions later still
            pid = self.stack.pid_of(whom)
            if pid is not None:
                return pid
            await asyncio.sleep(0.1)
        return None

    async def _fill_twice(self) -> None:
        for share in (0.3, 0.7):
            while self.progress() < share:  # noqa: ASYNC110  # a file grows
                await asyncio.sleep(0.1)
            self._note("disk full")
            await asyncio.to_thread(fill, self.stack.disk / "filler")
            self.counts["disk full"] += 1
            try:
                await asyncio.sleep(DISK_FULL_S)
            finally:
                (self.stack.disk / "filler").unlink(missing_ok=True)
            self._note("disk free")

    def _note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.stack.began_s:8.2f} {text}")


def fill(path: Path) -> None:
    """Take all room there is."""
    with path.open("wb") as file:
        for size in (2**24, 2**20, 2**12):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
