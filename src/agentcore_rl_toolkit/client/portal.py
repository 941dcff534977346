"""One daemon thread with one event loop, and the ways into it.

All of the client's logic runs there as coroutines. Sync callers block on a `concurrent.futures.Future`; async callers,
in whatever loop, await the same future. So sync and async calls mix freely, notebooks with a running loop work, and a
slow caller never holds the loop up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..errors import ConfigError

T = TypeVar("T")


class Portal:
    """Runs coroutines on a background loop. Starts on first use; thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, started if needed.

        Raises: ConfigError after `close`, and in a process forked after the first use (threads do not survive a fork).
        """
        loop = self._loop
        if loop is not None and self._pid == os.getpid() and not self._closed:
            return loop
        with self._lock:
            if self._closed:
                raise ConfigError("the client is closed; make a new one")
            if self._loop is not None:
                if self._pid != os.getpid():
                    raise ConfigError("the client was used before this process forked; make one in the child")
                return self._loop
            ready = threading.Event()
            self._loop = asyncio.new_event_loop()
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._run, args=(self._loop, ready), name=self._name, daemon=True)
            self._thread.start()
            ready.wait()
            return self._loop

    @property
    def started(self) -> bool:
        return self._loop is not None and not self._closed and self._pid == os.getpid()

    @property
    def on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop, ready: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(ready.set)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; cancelling the returned future cancels the task."""
        try:
            loop = self.loop
        except BaseException:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop soon, from any thread. Does nothing once the loop is gone."""
        loop = self._loop
        if loop is None or self._closed:
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop closed between the check and the call
            return

    def refuse_own_thread(self) -> None:
        """Raises: ConfigError on the loop's own thread, where a sync wait would never end."""
        if self.on_own_thread:
            raise ConfigError("a sync method was called from the client's own loop; use the `_async` one")

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it here. Ctrl-C cancels it.

        Raises: ConfigError on the loop's own thread, where waiting would never end.
        """
        try:
            self.refuse_own_thread()
        except ConfigError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and await it from another loop. Cancelling the caller cancels it."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self) -> None:
        """Stop the loop and join the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or self._pid != os.getpid():
            return
        loop.call_soon_threadsafe(loop.stop)
        if threading.current_thread() is not thread:
            thread.join(timeout=10)
