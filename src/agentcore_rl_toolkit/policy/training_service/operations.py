"""Operations of a training service: they run one at a time, in the order of their numbers; results are kept by id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError


@dataclass
class _Run:
    """``due`` is the number of the next operation; ``waiting`` are those that arrived before it."""

    due: int
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)


class Operations:
    """The operations of all runs. An operation waits for the numbers before it, whatever order they arrive in."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._results: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        self._trainer = ThreadPoolExecutor(1, "training-service")

    def begin(self, run: str, *, first: int = 0) -> None:
        """Add a run; ``first`` is the number of its first operation."""
        with self._lock:
            self._runs[run] = _Run(first)

    def submit(self, run: str, number: int, work: Callable[[], Any]) -> str:
        """The id of an operation; the same number again is the same operation. Raises: ConfigError without such a run."""
        operation = f"{run}:{number}"
        with self._lock:
            if run not in self._runs:
                raise ConfigError(f"there is no run {run!r}")
            if operation in self._results:
                return operation
            known = self._runs[run]
            result: Future[Any] = Future()
            self._results[operation] = result
            known.waiting[number] = lambda: _do(work, result)
            while (do := known.waiting.pop(known.due, None)) is not None:
                known.due += 1
                self._trainer.submit(do)
        return operation

    def blocked(self, run: str) -> bool:
        """Whether operations of this run wait for a number that is missing."""
        return bool(self._runs[run].waiting)

    def result(self, operation: str) -> Future[Any]:
        """The future of an operation. Raises: ConfigError on an unknown id."""
        if operation not in self._results:
            raise ConfigError(f"there is no operation {operation!r}")
        return self._results[operation]

    def close(self) -> None:
        self._trainer.shutdown(wait=False, cancel_futures=True)


def _do(work: Callable[[], Any], result: Future[Any]) -> None:
    try:
        result.set_result(work())
    except Exception as e:
        result.set_exception(e)
