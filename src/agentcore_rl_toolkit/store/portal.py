"""The sync face of the store: one daemon thread with one event loop per process, started on first use."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_portal: _Portal | None = None


class _Portal:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="store-portal", daemon=True)
        self.thread.start()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the portal's loop and wait for it; works inside a running loop too.

    Ctrl-C (any exception raised while waiting) cancels the coroutine. A forked child gets a portal of its own.

    Raises: RuntimeError when called on the portal's own thread, where waiting would never end.
    """
    global _portal
    with _lock:
        if _portal is None or _portal.pid != os.getpid():
            _portal = _Portal()
        portal = _portal
    if threading.current_thread() is portal.thread:
        coroutine.close()
        raise RuntimeError("a sync store call on the store's own loop would wait for itself; use the *_async method")
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        task = portal.loop.create_task(coroutine)
        tasks.append(task)
        task.add_done_callback(hand_over)

    def hand_over(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            answer.cancel()
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    try:
        # asyncio.run_coroutine_threadsafe would leave a moment in which the work runs and Ctrl-C finds nothing to cancel
        portal.loop.call_soon_threadsafe(begin)
        return answer.result()
    except BaseException:
        portal.loop.call_soon_threadsafe(cancel)
        raise


def _after_fork() -> None:
    # the parent may have held the lock at the moment of the fork
    global _lock, _portal
    _lock = threading.Lock()
    _portal = None


os.register_at_fork(after_in_child=_after_fork)
