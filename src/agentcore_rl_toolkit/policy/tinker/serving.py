"""A `TinkerServer` as a process of its own: ready file, signals, and no life after its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ..._servers.process import parent_gone, write_ready
from .service import TinkerServer


async def serve(
    server: TinkerServer, *, port: int = 0, ready_file: Path | None = None, parent_pid: int | None = None
) -> None:
    """Serve on loopback until SIGTERM, SIGINT or the end of process `parent_pid`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start(port=port)
    try:
        ready = {"url": server.url, "pid": os.getpid(), "base_model": server.model.base_model}
        if ready_file is not None:
            write_ready(ready_file, ready)
        print(f"Tinker service at {server.url}, base model {server.model.base_model}", file=sys.stderr, flush=True)
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait())]
        if parent_pid is not None:
            ends.append(asyncio.ensure_future(parent_gone(parent_pid)))
        _, left = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for waiting in left:
            waiting.cancel()
    finally:
        await server.stop()
