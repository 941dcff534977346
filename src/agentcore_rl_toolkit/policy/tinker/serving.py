"""A `TinkerServer` as a process of its own: ready file, signals, and no life after its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from ..server.process import write_atomically
from .service import TinkerServer

PARENT_CHECK_S = 0.5


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
            write_atomically(ready_file, json.dumps(ready))
        print(f"Tinker service at {server.url}, base model {server.model.base_model}", file=sys.stderr, flush=True)
        while not stop.is_set():
            try:
                async with asyncio.timeout(PARENT_CHECK_S):
                    await stop.wait()
            except TimeoutError:
                if parent_pid is not None and not _lives(parent_pid):
                    return
    finally:
        await server.stop()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
