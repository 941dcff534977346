"""Operations of a training service: they run one at a time, in the order of their numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Run:
    """``due`` is the number of the next operation; ``waiting`` are those that arrived before it."""

    due: int
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)


class Operations:
    """The operations of all runs. An operation waits for the numbers before it, whatever order they arrive in."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._trainer = ThreadPoolExecutor(1, "training-service")

    def begin(self, run: str, *, first: int = 0) -> None:
        """Add a run; ``first`` is the number of its first operation."""
        with self._lock:
            self._runs[run] = _Run(first)

    def submit(self, run: str, number: int, work: Callable[[], Any]) -> Future[Any]:
        """The result of an operation, whose number comes once."""
        result: Future[Any] = Future()
        with self._lock:
            known = self._runs[run]
            known.waiting[number] = lambda: _do(work, result)
            while (do := known.waiting.pop(known.due, None)) is not None:
                known.due += 1
                self._trainer.submit(do)
        return result

    def blocked(self, run: str) -> bool:
        """Whether operations of this run wait for a number that is missing."""
        return bool(self._runs[run].waiting)

    def close(self) -> None:
        self._trainer.shutdown(wait=False, cancel_futures=True)


def _do(work: Callable[[], Any], result: Future[Any]) -> None:
    result.set_running_or_notify_cancel()
    try:
        result.set_result(work())
    except Exception as e:
        result.set_exception(e)
