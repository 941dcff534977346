"""Run async methods for synchronous callers, on one daemon thread with one event loop.

Sync callers block on a `concurrent.futures.Future`, and async callers await the same one in their own loop. So sync and async
calls mix freely, notebooks with a running loop work, and connections live on between calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from .errors import ConfigError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

LONGEST_SLEEP_S = 1.0  # sleep of a thread that waits for a result. Ctrl-C takes at most this long.


def result_of(future: concurrent.futures.Future[T], timeout_s: float | None = None) -> T:
    """Wait for `future.result(timeout_s)`. Ctrl-C always ends the wait.

    A signal just before the thread falls asleep, or to another thread, does not wake it. So threads sleep only briefly.
    """
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = LONGEST_SLEEP_S if end_s is None else min(LONGEST_SLEEP_S, end_s - time.monotonic())
        try:
            return future.result(max(0.0, left_s))
        except TimeoutError:
            if future.done():  # the work's own, or it ended just now
                return future.result()
            if end_s is not None and time.monotonic() >= end_s:
                raise


class Portal:
    """Runs coroutines on a background loop. Starts on first use. Thread-safe.

    A portal with an `owner` (a name for errors) is closed with its owner, and refuses to work in a forked child, where the
    owner's state is a copy. One without an owner serves the whole process, and a forked child gets a fresh loop.
    """

    def __init__(self, name: str, *, owner: str | None = None) -> None:
        self._name, self._owner = name, owner
        self._locks: dict[int, Any] = {}  # one per process: at a fork, a thread of the parent may hold its lock
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False

    @property
    def _lock(self) -> Any:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, started if needed.

        Raises: ConfigError after `close`, and for an owned portal in a process forked after the first use.
        """
        with self._lock:
            if self._closed:
                raise ConfigError(f"the {self._owner or self._name} is closed; make a new one")
            if self._loop is not None and self._pid == os.getpid():
                return self._loop
            if self._loop is not None and self._owner is not None:
                raise ConfigError(f"the {self._owner} was used before this process forked; make one in the child")
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            loop = runner.get_loop()
            thread = threading.Thread(target=self._run, args=(runner,), name=self._name, daemon=True)
            thread.start()
            self._loop, self._thread, self._pid = loop, thread, os.getpid()
            return loop

    @property
    def started(self) -> bool:
        return self._loop is not None and not self._closed and self._pid == os.getpid()

    @property
    def on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def refuse_own_thread(self) -> None:
        """Check the thread. Raises: ConfigError on the loop's own thread, where a sync wait would never end."""
        if self.on_own_thread:
            raise ConfigError(
                "a sync method was called on the thread that does its work, and would wait for itself; use the `_async` one"
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop. Cancelling the returned future cancels the task."""
        try:
            loop = self.loop
        except BaseException:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop soon, from any thread. Does nothing after the end of the loop."""
        loop = self._loop
        if loop is None or self._closed:
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop closed between the check and the call
            return

    def sync(self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
        """Make the sync twin of an async method: the same signature and docstring, without ``_async`` in its name."""

        @functools.wraps(method)
        def call(self_: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self.call(method(self_, *args, **kwargs))

        call.__name__ = method.__name__.removesuffix("_async")
        call.__qualname__ = method.__qualname__.removesuffix("_async")
        return call

    def call(self, coroutine: Coroutine[Any, Any, T], *, clean_up_s: float = 0.0) -> T:
        """Run a coroutine on the loop and wait for it in this thread. Ctrl-C cancels it and gives it `clean_up_s` to end.

        Raises: ConfigError on the loop's own thread, where waiting would never end.
        """
        try:
            self.refuse_own_thread()
            loop = self.loop
        except BaseException:
            coroutine.close()
            raise
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[None]] = []

        async def work() -> None:
            try:
                answer.set_result(await coroutine)
            except asyncio.CancelledError:
                answer.cancel()
                answer.set_running_or_notify_cancel()  # or a caller that waits with a limit is not woken
            except BaseException as e:
                answer.set_exception(e)

        try:
            # asyncio.run_coroutine_threadsafe would leave a moment in which the work runs and Ctrl-C finds nothing to cancel.
            loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(work())))
            return result_of(answer)
        except BaseException:
            if not answer.done():
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                concurrent.futures.wait([answer], clean_up_s)
            raise

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and await it from another loop. Cancelling the caller cancels it."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self) -> None:
        """Stop the loop and join the thread."""
        with self._lock:
            running, self._closed = self.started, True
            loop, thread = self._loop, self._thread
        if not running or loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if threading.current_thread() is not thread:
            thread.join(timeout=10)

    def _run(self, runner: asyncio.Runner) -> None:
        with runner:  # it cancels what is left, and closes the loop
            while not self._closed:  # user code may stop the loop, and so does a task that raises SystemExit
                with contextlib.suppress(BaseException):
                    runner.get_loop().run_forever()
