"""Runs the agent's function outside the loops that serve requests: sync functions in a thread each, async ones on one loop.

Threads are daemons: a process that must stop writes its record and ends, even when the agent hangs in a blocking call. All async
functions of a process share one loop, production's too, because agents keep loop-bound clients in globals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from .._portal import Portal


class AgentRunner:
    """Starts functions of the agent. Their results arrive in futures. Nothing is started before the first one."""

    def __init__(self) -> None:
        self._portal = Portal("rollout-loop")
        self._tasks: dict[concurrent.futures.Future[Any], asyncio.Task[None]] = {}

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop of async functions."""
        return self._portal.loop

    def start(
        self, func: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context, name: str
    ) -> concurrent.futures.Future[Any]:
        """Begin ``func(*args)``. The future gets its result or its exception (any BaseException)."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it

        async def on_loop(result: Awaitable[Any]) -> None:
            try:
                future.set_result(await result)
            except BaseException as e:
                future.set_exception(e)
                if isinstance(e, asyncio.CancelledError):
                    raise

        def begin(result: Awaitable[Any], context: contextvars.Context) -> None:
            task = self.loop().create_task(on_loop(result), name=name, context=context)
            self._tasks[future] = task  # asyncio drops a task that nothing references
            task.add_done_callback(lambda _: self._tasks.pop(future, None))

        def in_thread() -> None:
            try:
                result = func(*args)
                if inspect.isawaitable(result):
                    self.loop().call_soon_threadsafe(begin, result, contextvars.copy_context())
                else:
                    future.set_result(result)
            except BaseException as e:  # a SystemExit in the agent is a failed rollout, not the end of the server
                future.set_exception(e)

        threading.Thread(target=context.run, args=(in_thread,), name=name, daemon=True).start()
        return future

    def cancel(self, *futures: concurrent.futures.Future[Any]) -> None:
        """Cancel the async functions of these futures, or of all. A function in a thread cannot be cancelled."""
        for future in futures or list(self._tasks):
            task = self._tasks.get(future)
            if task is not None:
                self.loop().call_soon_threadsafe(task.cancel)


async def wait_for(result: Awaitable[Any]) -> Any:
    """Make a coroutine of any awaitable."""
    return await result
