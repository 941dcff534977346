"""The S3 endpoint as a server of its own, on uvicorn."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from .._installation import missing_extra
from .._servers.host_check import HostCheck
from .._servers.open_files import raise_file_limit
from .._servers.process import listen, parent_gone, url_of, write_ready
from .app import S3App, S3Config
from .wire.xml import refusal_document

IDLE_S = 75  # uvicorn's 5 s end connections that clients count on between two rollouts


def serve(
    config: S3Config,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    buckets: Iterable[str] = (),
    ready_file: Path | None = None,
    parent_pid: int | None = None,
    announce: Callable[[str], None] | None = None,
    allowed_hosts: Iterable[str] = (),
    callers: Literal["user", "any"] = "user",
) -> None:
    """Serve until SIGTERM or SIGINT, or until the process ``parent_pid`` is gone. ``buckets`` are created first.

    ``allowed_hosts``: more names of this server, see `HostCheck`. ``callers``: who may use it where the configuration has no
    credentials: what runs on this machine as this user or root, sessions included, or whoever reaches the port.

    Raises: ConfigError when the port or the directory is taken; MissingExtraError without an HTTP server.
    """
    try:
        import uvicorn
        import uvloop

        from .._servers.bounded_http import Bounds
        from .._servers.callers import Callers
        from .callers import Connection, UsersOnly
    except ImportError as e:
        raise missing_extra("the S3 endpoint needs uvicorn", "runtime") from e
    raise_file_limit()
    sock = listen(host, port)
    bounds = Bounds(hosts=HostCheck((host, sock.getsockname()[0]), allowed_hosts), error=refusal_document)
    protocol: Any = functools.partial(Connection, bounds=bounds)
    asked: Callers[Any] = Callers(tuple)
    app = S3App(config, access=UsersOnly(asked) if callers == "user" and not config.credentials else None)
    app.ensure_buckets(buckets)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=IDLE_S,
        )
    )

    async def run() -> None:
        watcher = asyncio.create_task(_stop_without_parent(server, parent_pid)) if parent_pid is not None else None
        try:
            if announce is not None:
                announce(f"S3 endpoint {url_of(sock)} over {config.root}")
            if ready_file is not None:
                write_ready(ready_file, {"url": url_of(sock), "pid": os.getpid(), "dir": str(config.root)})
            await server.serve(sockets=[sock])
        finally:
            if watcher is not None:
                watcher.cancel()

    def stop(signum: int, frame: Any) -> None:
        server.should_exit = True  # asked to stop before uvicorn listens for signals itself

    # uvicorn re-raises the signal that stopped it once it has shut down; a stop on request is a success.
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        app.close()
        asked.close()
        sock.close()


async def _stop_without_parent(server: Any, parent_pid: int) -> None:
    await parent_gone(parent_pid)
    server.should_exit = True
