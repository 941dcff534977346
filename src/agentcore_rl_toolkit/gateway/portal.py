"""One daemon thread with one event loop, for the sync faces of async methods."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def _start() -> asyncio.AbstractEventLoop:
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="gateway-client", daemon=True)
            _thread.start()
        return _loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, inside a running loop or not; cancelled on Ctrl-C.

    Raises: RuntimeError when called from the portal's own thread, which would wait for itself.
    """
    loop = _start()
    if threading.current_thread() is _thread:
        work.close()
        raise RuntimeError("a sync method was called from the portal's own thread; use the async twin there")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except (KeyboardInterrupt, concurrent.futures.CancelledError):
        future.cancel()
        raise
