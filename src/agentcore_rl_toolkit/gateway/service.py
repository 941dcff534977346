"""A gateway as a process: signals, the ready file, and its end with the parent process."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._servers import keys, process
from .._servers.host_check import is_loopback
from .._servers.open_files import raise_file_limit
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
    ready_file: Path | None = None,
    parent_pid: int | None = None,
    extra: dict[str, Any] | None = None,
    make_key: bool = True,
    prepare: Callable[[Gateway], None] = lambda gateway: None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT (or until `parent_pid` is gone).

    ``make_key``: without an admin key in its settings it makes one and leaves it to its user's clients (`_servers.keys`).
    ``prepare`` is called with the gateway before it starts.
    Raises: ConfigError.
    """
    raise_file_limit()
    made: str | None = None
    if make_key and config.admin_key is None and is_loopback(config.host):
        made = keys.make()
        config = dataclasses.replace(config, admin_key=made)
    if ready_file is not None:
        check_ready(ready_file)
    gateway = Gateway(config)
    prepare(gateway)
    await gateway.start()
    settle_memory()
    stop = process.stop_event(parent_pid)
    key_file = keys.leave("gateway", gateway.url, made) if made is not None else None
    if ready_file is not None:
        ready = {"url": gateway.url, "pid": os.getpid(), **(extra or {})}
        if key_file is not None:
            ready["admin_key_file"] = str(key_file)
        process.write_ready(ready_file, ready)
    print(f"gateway listening on {gateway.url} ({gateway.recovered} calls stored)", file=sys.stderr, flush=True)
    if key_file is not None:
        print(f"  its admin key is in {key_file}", file=sys.stderr, flush=True)
    await stop.wait()
    keys.forget(key_file)
    await gateway.stop()


def check_ready(path: Path) -> None:
    """Raises: ConfigError when the ready file could not be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"the ready file {path} cannot be written: its directory must exist and be writable")
