"""Runs the policy server as a process: socket, ready file, signals, and its end with the parent process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn

from ..._servers import keys
from ..._servers.host_check import CheckedApp, HostCheck
from ..._servers.open_files import raise_file_limit
from ..._servers.process import listen, stop_event, url_of, write_ready
from ...errors import ConfigError
from ...weights.engines import POLICY_KEY
from ..engine import Engine
from .app import create_app


class Server(uvicorn.Server):
    """A server that leaves signals to us: uvicorn raises them again after its shutdown, and the exit code would not be 0."""

    def __init__(self, app: Any, host: str, listener: socket.socket, allowed_hosts: Sequence[str]) -> None:
        checked = CheckedApp(app, HostCheck((host, listener.getsockname()[0]), allowed_hosts))
        super().__init__(
            uvicorn.Config(
                checked,
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                timeout_keep_alive=120,
                timeout_graceful_shutdown=3,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    weights: Path | None,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    ready_file: Path | None,
    parent_pid: int | None,
    threads: int,
    dtype: str | None,
    seed: int | None,
    admin_key: str | None,
) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end. ``port`` 0 takes a free one.

    ``dtype``: float32 or bfloat16, by default `placement`'s. Without an ``admin_key``, make one and store it for this
    user's clients (`_servers.keys`). Raises: ConfigError (port in use, or not a policy's folder), PolicyError.
    """
    if admin_key is None and not keys.is_here(host):
        raise ConfigError(f"listening on {host} needs an admin key that its clients know: set {POLICY_KEY}")
    torch.set_num_threads(threads)
    raise_file_limit()

    async def run() -> None:
        made = keys.make() if admin_key is None else None
        server = Server(create_app(engine, admin_key=admin_key or made), host, listener, allowed_hosts)
        stopping = asyncio.create_task(stop_event(parent_pid).wait())
        stopping.add_done_callback(lambda _: setattr(server, "should_exit", True))
        ready = {"url": url_of(listener), "pid": os.getpid(), "weight_version": engine.weight_version}
        print(f"policy server at {ready['url']}", file=sys.stderr, flush=True)
        key_file = keys.leave("policy", str(ready["url"]), made) if made is not None else None
        if key_file is not None:
            ready["admin_key_file"] = str(key_file)
            print(f"  its admin key is in {key_file}", file=sys.stderr, flush=True)
        if ready_file is not None:
            write_ready(ready_file, ready)
        await server.serve(sockets=[listener])
        keys.forget(key_file)

    with listen(host, port) as listener, Engine.from_directory(weights, dtype=dtype, seed=seed) as engine:
        # The engine's thread gives the interpreter lock away at every operation. With the default, it would wait 5 ms to get the
        # lock back whenever the HTTP side is busy.
        sys.setswitchinterval(0.0005)
        asyncio.run(run())
