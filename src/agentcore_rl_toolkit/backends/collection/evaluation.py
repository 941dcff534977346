"""Evaluations while the training goes on: one at a time, on a second engine with a copy of the version that each names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Evaluate = Callable[[int], Coroutine[Any, Any, None]]


class EvaluationBeside:
    """See the module. Used with ``async with``, whose end waits for the evaluation that runs, or cancels it on an error.

    ``evaluate`` runs the held-out inputs against the second engine, by this version of the weights. ``version`` is that of the
    evaluation that runs, None between them.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self.version: int | None = None
        self._evaluate = evaluate
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EvaluationBeside:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            await self.end()
        elif self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def start(self, version: int, publish: Callable[[], object]) -> None:
        """Wait for the evaluation before, put the weights into the second engine, in a thread, and begin.

        Raises: what the evaluation before raised, and what ``publish`` raises.
        """
        await self.end()
        await asyncio.to_thread(publish)
        self.version = version
        self._running = asyncio.create_task(self._evaluate(version))

    async def end(self) -> None:
        """Wait for the evaluation that runs. Raises: what it raised."""
        running, self._running, self.version = self._running, None, None
        if running is not None:
            await running
