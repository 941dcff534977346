"""Run coroutines from synchronous code: one daemon thread with one event loop, shared by all backends.

Clients that live on this loop keep their connections between calls, which a fresh loop per call would close.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLEAN_UP_S = 60.0  # stopping live sessions and deleting them at the gateway, each with a limit of its own

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def start() -> asyncio.AbstractEventLoop:
    """The shared loop, started if it is not running yet."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():  # a forked child has no thread
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="agentcore-rl-backends", daemon=True)
            thread.start()
            _loop, _thread = loop, thread
        return _loop


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; works inside a running loop and in notebooks.

    Ctrl-C cancels the coroutine and waits for its clean-up, at most `CLEAN_UP_S`.
    Raises: RuntimeError when called on the portal's own thread.
    """
    loop = start()
    if threading.current_thread() is _thread:
        work.close()
        raise RuntimeError("called from the background loop itself; use the async twin there")
    ended = threading.Event()
    future = asyncio.run_coroutine_threadsafe(_watched(work, ended), loop)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(CLEAN_UP_S)
        raise


async def _watched(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()
