"""Runs the policy server as a process: socket, ready file, signals, and its end with the parent process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import uvicorn

from ..._servers import keys
from ..._servers.host_check import CheckedApp, HostCheck
from ..._servers.open_files import raise_file_limit
from ..._servers.process import listen, stop_event, url_of, write_ready
from ...errors import ConfigError
from ..engine import Engine
from .app import create_app
from .keys import ADMIN_KEY_ENV


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of a policy server process. ``port`` 0 takes a free one. ``dtype``: float32 or bfloat16; None: `placement`'s.

    Without an ``admin_key`` one is made and left to this user's clients (`_servers.keys`).
    """

    weights: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    ready_file: Path | None = None
    parent_pid: int | None = None
    threads: int = 1
    dtype: str | None = None
    seed: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    admin_key: str | None = field(default=None, repr=False)


class Server(uvicorn.Server):
    """A server that leaves signals to us: uvicorn raises them again after its shutdown, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM, SIGINT or the parent's end. Raises: ConfigError (port in use, no policy there), PolicyError."""
    if config.admin_key is None and not keys.is_here(config.host):
        raise ConfigError(f"listening on {config.host} needs an admin key that its clients know: set {ADMIN_KEY_ENV}")
    torch.set_num_threads(config.threads)
    raise_file_limit()
    listener = listen(config.host, config.port)
    try:
        engine = Engine.from_directory(config.weights, dtype=config.dtype, seed=config.seed)
        # The engine's thread gives the interpreter lock away at every operation; with the default of 5 ms it would wait that long
        # for it whenever the HTTP side is busy.
        sys.setswitchinterval(0.0005)
        with engine:
            asyncio.run(_serve(config, engine, listener))
    finally:
        listener.close()


async def _serve(config: ServeConfig, engine: Engine, listener: socket.socket) -> None:
    made = keys.make() if config.admin_key is None else None
    app = create_app(engine, admin_key=config.admin_key or made)
    hosts = HostCheck((config.host, listener.getsockname()[0]), config.allowed_hosts)
    server = Server(
        uvicorn.Config(
            CheckedApp(app, hosts),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=120,
            timeout_graceful_shutdown=3,
        )
    )

    def stop(_: object) -> None:
        server.should_exit = True

    stopping = asyncio.create_task(stop_event(config.parent_pid).wait())
    stopping.add_done_callback(stop)
    url = url_of(listener)
    # Before the first request is answered: a client must find the key by then.
    key_file = keys.leave("policy", url, made) if made is not None else None
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.005)
    if server.started:
        if config.ready_file is not None:
            ready = {"url": url, "pid": os.getpid(), "weight_version": engine.weight_version}
            if key_file is not None:
                ready["admin_key_file"] = str(key_file)
            write_ready(config.ready_file, ready)
        print(f"policy server at {url}", file=sys.stderr, flush=True)
        if key_file is not None:
            print(f"  its admin key is in {key_file}", file=sys.stderr, flush=True)
    await serving
    keys.forget(key_file)
