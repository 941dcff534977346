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

from .stack import Stack

ROLES = ("runtime", "template", "guardian", "gateway", "model", "trainer", "session")
OFTEN = ("session", "session", "model", "gateway")  # once more in every round
STOPPED_S = (0.2, 2.5)
Event = tuple[str, str, float]  # what, whom, an argument


def plan(seed: int, rounds: int) -> list[Event]:
    """Every round kills and stops every role, in an order of its own."""
    rng = random.Random(seed)
    events: list[Event] = []
    for _ in range(rounds):
        deck: list[Event] = [("kill", role, 0.0) for role in (*ROLES, *OFTEN)]
        deck += [("stop", role, rng.uniform(*STOPPED_S)) for role in ROLES]
        rng.shuffle(deck)
        events += deck
    return events


class Chaos:
    """``counts`` is what was really done: nobody is there to be killed where a process is just being started."""

    def __init__(
        self, stack: Stack, events: list[Event], rounds: int, interval_s: float, progress: Callable[[], float]
    ) -> None:
        self.stack, self.events, self.rounds = stack, events, rounds
        self.interval_s, self.progress = interval_s, progress
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []

    async def run(self) -> None:
        """Do it all, or until cancelled. Events come in equal distances, those of the first round faster if the rollouts are."""
        tasks: list[asyncio.Task[None]] = []
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

    def _note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.stack.began_s:8.2f} {text}")
