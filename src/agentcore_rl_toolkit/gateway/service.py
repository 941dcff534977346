"""A gateway as a process: signals, the ready file, and its end with the parent process."""

from __future__ import annotations

import contextlib
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
from .config import GatewayConfig
from .server import Gateway

KEPT_BYTES = 16 * 2**20  # freed memory that the process keeps: new pages cost more than the copies in them


async def serve(
    config: GatewayConfig,
    *,
    ready_file: Path | None = None,
    parent_pid: int | None = None,
    make_key: bool = True,
    prepare: Callable[[Gateway], None] = lambda gateway: None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT (or until the process `parent_pid` has ended).

    ``make_key``: a gateway without an admin key in its settings makes one, and leaves it to its user's clients
    (`_servers.keys`).
    ``prepare`` is called with the gateway before it starts.
    Raises: ConfigError, or OSError when the ready file cannot be written.
    """
    raise_file_limit()
    made: str | None = None
    if make_key and config.admin_key is None and is_loopback(config.host):
        made = keys.make()
        config = dataclasses.replace(config, admin_key=made)
    gateway = Gateway(config)
    prepare(gateway)
    await gateway.start()
    gc.collect()
    gc.freeze()  # the garbage collector skips the imported modules, and runs rarely
    gc.set_threshold(50_000, 50, 1000)
    sys.setswitchinterval(0.0005)
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD
        mallopt(-3, KEPT_BYTES // 4)  # M_MMAP_THRESHOLD
    stop = process.stop_event(parent_pid)
    key_file = keys.leave("gateway", gateway.url, made) if made is not None else None
    try:
        if ready_file is not None:
            ready: dict[str, Any] = {"url": gateway.url, "pid": os.getpid()}
            if key_file is not None:
                ready["admin_key_file"] = str(key_file)
            process.write_ready(ready_file, ready)
        print(f"gateway listening on {gateway.url} ({gateway.recovered} calls stored)", file=sys.stderr, flush=True)
        if key_file is not None:
            print(f"  its admin key is in {key_file}", file=sys.stderr, flush=True)
        await stop.wait()
    finally:
        keys.forget(key_file)
        await gateway.stop()
