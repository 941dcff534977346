"""Serves an ASGI app on an inherited socket with uvicorn, without using CPU when idle.

Stock uvicorn wakes ten times a second to see whether it should stop: a thousand idle sessions would keep a whole core busy.
Here the loop sleeps until a signal wakes it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import sys
from typing import Any

IDLE_TICK_S = 60.0  # uvicorn's `Date` header and its callbacks are refreshed this often. No client sees them
KEEP_ALIVE_S = 10**7  # the runtime owns the connections and closes them. A race between both ends would lose a request


def make_config(app: Any, options: dict[str, Any]) -> Any:
    """Make the uvicorn config that an agent asked for, without its address. Import what serving needs, so a fork inherits it."""
    import uvicorn

    kept = {k: v for k, v in options.items() if k not in ("host", "port", "uds", "fd", "reload", "workers", "app_dir")}
    kept["timeout_keep_alive"] = KEEP_ALIVE_S
    config = uvicorn.Config(app, **kept)
    config.load()
    return config


def serve(config: Any, listener: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit status for the process."""
    import uvicorn

    class SessionServer(uvicorn.Server):
        async def main_loop(self) -> None:
            loop = asyncio.get_running_loop()
            self._loop, self._wake = loop, asyncio.Event()
            while not await self.on_tick(0):
                try:
                    await asyncio.wait_for(self._wake.wait(), IDLE_TICK_S)
                except TimeoutError:
                    continue

        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            wake = getattr(self, "_wake", None)
            if wake is not None:
                self._loop.call_soon_threadsafe(wake.set)

    # uvicorn raises the signal again once it has drained. A handler of the agent's own then runs, as on AWS. The default
    # action would end the process before its exit functions ran.
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda number, frame: None)
    server = SessionServer(config)
    try:
        factory = config.get_loop_factory()
    except AttributeError:  # uvicorn < 0.36
        config.setup_event_loop()
        factory = asyncio.new_event_loop
    loop = factory() if factory is not None else asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(server.serve(sockets=[listener]))
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    return 0 if server.started else 3


def leave(status: int) -> None:
    """End the process: run exit functions, flush, and skip the interpreter's teardown, which costs CPU and frees nothing."""
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(status)
