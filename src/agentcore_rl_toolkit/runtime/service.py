"""Run a local runtime as a process: bind, load agents, write the ready file, stop on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from .._servers import keys
from .._servers.host_check import HostCheck
from .._servers.open_files import raise_file_limit
from .._servers.process import bind, parent_gone, write_private, write_ready
from ..errors import ConfigError
from . import roots
from .config import RuntimeConfig
from .http.app import RuntimeApp
from .runtime import Runtime
from .sessions.table import Launcher

ACCESS_KEY = "local"  # the name of a key that the runtime makes itself
AFTER_SESSIONS_S = 2  # for the replies to the calls of sessions that were ended by force


def run(config: RuntimeConfig, agents: Sequence[tuple[str, Path]], **options: Any) -> None:
    """Blocking form of `serve` on uvloop; the options are its keywords."""
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, agents, **options))


async def serve(
    config: RuntimeConfig,
    agents: Sequence[tuple[str, Path]],
    *,
    launcher: Launcher | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    ready_file: Path | None = None,
    parent_pid: int | None = None,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, or until the parent is gone. ``allowed_hosts``: more names of this server, see `HostCheck`.

    Raises: ConfigError, AgentLoadError.
    """
    listener = bind(host, port)
    url = f"http://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}"
    if not config.credentials and config.callers == "user":
        config = replace(config, credentials={ACCESS_KEY: keys.make()})
    runtime = Runtime(config, launcher=launcher)
    loop = asyncio.get_running_loop()
    loading = asyncio.ensure_future(runtime.start(list(agents)))
    server: _Server | None = None

    def stop() -> None:  # uvicorn has handlers of its own, but not from the first moment, and raises the signal again
        if server is None:
            loading.cancel()
        else:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        arns = await loading
    except BaseException as e:
        await runtime.close()
        listener.close()
        if isinstance(e, asyncio.CancelledError) and loading.cancelled():
            return  # a signal came while it loaded
        raise
    app = RuntimeApp(runtime, HostCheck({listener.getsockname()[0], host}, allowed_hosts))
    server = _Server(
        runtime,
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(config.times.shutdown_grace_s) + AFTER_SESSIONS_S,
        ),
    )
    content: dict[str, Any] = {"url": url, "pid": os.getpid(), "agents": arns, "isolation": runtime.launcher.tier}
    record = {**content, "root": str(runtime.root), "state_dir": str(runtime.state_dir)}
    roots.describe_server(runtime.root, record)
    roots.describe_server(runtime.state_dir, record)
    key_file = None
    for access_key, secret in list(config.credentials.items())[:1]:
        file = runtime.root / "credentials"  # for AWS's own clients
        write_private(file, f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret}\n")
        content["credentials_file"] = str(file)
        key_file = keys.leave(keys.RUNTIME, url, f"{access_key}:{secret}") if keys.is_here(host) else None
    watch = asyncio.create_task(_watch(server, content, ready_file, parent_pid))
    try:
        await server.serve(sockets=[listener])
    finally:
        await runtime.close()
        watch.cancel()
        [end] = await asyncio.gather(watch, return_exceptions=True)
        if ready_file is not None:
            with contextlib.suppress(OSError):  # it may be in a place where there can be none
                os.unlink(ready_file)
        keys.forget(key_file)
    if isinstance(end, OSError):
        raise ConfigError(f"the ready file {ready_file} cannot be written: {end.strerror or end}") from end


class _Server(uvicorn.Server):
    """Ends the sessions at once on a shutdown, so that calls under way get the rest of their replies, or a 424."""

    def __init__(self, runtime: Runtime, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._runtime = runtime

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        sessions = asyncio.create_task(self._runtime.end_sessions())
        await super().shutdown(sockets)
        await sessions


async def _watch(
    server: uvicorn.Server, content: dict[str, Any], ready_file: Path | None, parent_pid: int | None
) -> None:
    while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, no event
        await asyncio.sleep(0.005)
    if ready_file is not None:
        try:
            write_ready(ready_file, content)
        except OSError:  # the process that waits for this file would wait for ever
            server.should_exit = True
            raise
    print(f"AgentCore Runtime on {content['url']}, isolation: {content['isolation']}", flush=True)
    for name in ("", "_CONTROL"):
        print(f"  export AWS_ENDPOINT_URL_BEDROCK_AGENTCORE{name}={content['url']}", flush=True)
    if "credentials_file" in content:
        print(f"  export AWS_SHARED_CREDENTIALS_FILE={content['credentials_file']}", flush=True)
    for name, arn in content["agents"].items():
        print(f"  {name}: {arn}", flush=True)
    if parent_pid is not None:
        await parent_gone(parent_pid)
        server.should_exit = True
