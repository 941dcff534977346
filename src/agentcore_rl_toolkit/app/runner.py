"""Runs the user's function outside the loops that answer requests: sync functions in a thread each, async ones on one loop.

Threads are daemons: a process that must stop writes its record and ends, even when the agent hangs in a blocking call. The async
functions of a process share one loop, production's too, because agents keep loop-bound clients in globals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


class AgentRunner:
    """Starts user functions and hands back futures of what they return. Nothing is started before the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[concurrent.futures.Future[Any], asyncio.Task[None]] = {}

    def start(
        self, func: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context, name: str
    ) -> concurrent.futures.Future[Any]:
        """Begin ``func(*args)``; its result or exception (any BaseException) arrives in the future."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it
        if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__):
            self._start_async(func, args, context, name, future)
        else:
            thread = threading.Thread(
                target=context.run, args=(self._run_sync, func, args, name, future), name=name, daemon=True
            )
            thread.start()
        return future

    def cancel(self, *futures: concurrent.futures.Future[Any]) -> None:
        """Cancel the async functions behind these futures, all when none is given; one in a thread of its own cannot be."""
        for future in futures or list(self._tasks):
            task = self._tasks.get(future)
            if self._loop is not None and task is not None:
                self._loop.call_soon_threadsafe(task.cancel)

    def _run_sync(
        self, func: Callable[..., Any], args: tuple[Any, ...], name: str, future: concurrent.futures.Future[Any]
    ) -> None:
        try:
            result = func(*args)
            if inspect.isawaitable(result):  # a partial or lambda around an async function
                awaitable = result

                async def wait() -> Any:
                    return await awaitable

                self._start_async(wait, (), contextvars.copy_context(), name, future)
                return
        except BaseException as e:  # a SystemExit in the agent is a failed rollout, not the end of the server
            future.set_exception(e)
        else:
            future.set_result(result)

    def _start_async(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        name: str,
        future: concurrent.futures.Future[Any],
    ) -> None:
        async def run() -> None:
            try:
                result = await func(*args)
            except BaseException as e:
                future.set_exception(e)
                if isinstance(e, asyncio.CancelledError):
                    raise
            else:
                future.set_result(result)

        loop = self.loop()

        def begin() -> None:
            task = loop.create_task(run(), name=name, context=context)
            self._tasks[future] = task  # asyncio drops a task that nothing references
            task.add_done_callback(lambda _: self._tasks.pop(future, None))

        loop.call_soon_threadsafe(begin)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop of async functions."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=keep_running, args=(self._loop,), name="rollout-loop", daemon=True).start()
            return self._loop


def keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop for good: an agent may stop it, and asyncio stops it when a task of the agent's raises SystemExit."""
    while True:
        with contextlib.suppress(BaseException):
            loop.run_forever()
