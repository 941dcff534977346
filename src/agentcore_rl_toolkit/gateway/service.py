"""A gateway as a process: signals, the ready file, the parent it ends with."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

from .._open_files import raise_file_limit
from ..errors import ConfigError
from .config import GatewayConfig
from .server import Gateway

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def settle_memory() -> None:
    """Keep the collector from looking at the import-time heap again, and from looking often at all.

    The C library keeps what large replies leave free for the next ones: given back and asked for again, every page of
    them would cost a fault, a tenth of the CPU of a long reply.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)
        mallopt(_M_TOP_PAD, 4 * 2**20)
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)


async def serve(
    config: GatewayConfig,
    *,
    ready_file: str | None = None,
    parent_pid: int | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT (or until `parent_pid` is gone). Raises: ConfigError."""
    raise_file_limit()
    if ready_file is not None:
        check_ready(Path(ready_file))
    gateway = Gateway(config)
    await gateway.start()
    settle_memory()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready = {"url": gateway.url, "pid": os.getpid(), **(extra or {})}
    if ready_file is not None:
        write_ready(Path(ready_file), ready)
    print(f"gateway listening on {gateway.url} ({gateway.recovered} stored frames)", file=sys.stderr, flush=True)
    watch = loop.create_task(_watch_parent(parent_pid, stop)) if parent_pid is not None else None
    await stop.wait()
    if watch is not None:
        watch.cancel()
    await gateway.stop()


async def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            stop.set()
            return
        except PermissionError:
            return
        await asyncio.sleep(1.0)


def check_ready(path: Path) -> None:
    """Raises: ConfigError when the ready file could not be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"the ready file {path} cannot be written: its directory must exist and be writable")


def write_ready(path: Path, content: dict[str, Any]) -> None:
    """Write the ready file in one step, so that whoever waits for it never reads half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)
