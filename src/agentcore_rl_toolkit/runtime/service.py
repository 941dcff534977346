"""Run a local runtime as a process: bind, load agents, write the ready file, stop on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from .._servers import keys
from .._servers.host_check import HostCheck
from .._servers.open_files import raise_file_limit
from .._servers.process import BACKLOG, bind, stop_event, url_of, write_private, write_ready
from .config import RuntimeConfig
from .http.app import RuntimeApp
from .runtime import Runtime
from .sessions.table import Launcher

ACCESS_KEY = "local"  # the name of a key that the runtime makes itself
AFTER_SESSIONS_S = 2  # time for the replies to calls of killed sessions


def run(config: RuntimeConfig, agents: Sequence[tuple[str, Path]], **options: Any) -> None:
    """Run `serve` on uvloop, and block. The options are its keywords."""
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
    """Serve until SIGTERM or SIGINT, or until the parent ends. ``allowed_hosts``: more names of this server, see `HostCheck`.

    Raises: ConfigError, AgentLoadError.
    """
    if not config.credentials and config.callers == "user":
        config = replace(config, credentials={ACCESS_KEY: keys.make()})
    listener = bind(host, port)
    try:
        runtime = Runtime(config, launcher=launcher)
    except BaseException:
        listener.close()
        raise
    stop = stop_event(parent_pid)
    loading = asyncio.create_task(runtime.start(list(agents)))
    stopping = asyncio.create_task(stop.wait())
    stopping.add_done_callback(lambda _: loading.cancel())
    try:
        arns = await loading
        hosts = HostCheck({listener.getsockname()[0], host}, allowed_hosts)
        with _described(runtime, url_of(listener), arns, has_key=keys.is_here(host)) as content:
            server = _Server(runtime, RuntimeApp(runtime, hosts), lambda: _announce(content, ready_file))
            stopping.add_done_callback(lambda _: setattr(server, "should_exit", True))
            await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        if not loading.cancelled():  # otherwise a signal came during the load
            raise
    finally:
        await runtime.close()
        stopping.cancel()
        listener.close()
        if ready_file is not None:
            with contextlib.suppress(OSError):  # it may be in a place where there can be none
                os.unlink(ready_file)


@contextlib.contextmanager
def _described(runtime: Runtime, url: str, arns: Mapping[str, str], *, has_key: bool) -> Iterator[dict[str, Any]]:
    """Leave the address and the key of a runtime where its user's commands find them. Yields the content of its ready file."""
    content: dict[str, Any] = {"url": url, "pid": os.getpid(), "agents": arns, "isolation": runtime.launcher.tier}
    record = json.dumps({**content, "root": str(runtime.root), "state_dir": str(runtime.state_dir)})
    for folder in (runtime.root, runtime.state_dir):
        write_private(folder / "server.json", record)
    key_file = None
    if runtime.config.credentials:
        access_key, secret = next(iter(runtime.config.credentials.items()))
        file = runtime.root / "credentials"  # AWS's own clients read it
        write_private(file, f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret}\n")
        content["credentials_file"] = str(file)
        key_file = keys.leave(keys.RUNTIME, url, f"{access_key}:{secret}") if has_key else None
    try:
        yield content
    finally:
        keys.forget(key_file)


def _announce(content: dict[str, Any], ready_file: Path | None) -> None:
    if ready_file is not None:
        write_ready(ready_file, content)
    exports = {f"AWS_ENDPOINT_URL_BEDROCK_AGENTCORE{name}": content["url"] for name in ("", "_CONTROL")}
    if "credentials_file" in content:
        exports["AWS_SHARED_CREDENTIALS_FILE"] = content["credentials_file"]
    lines = [f"AgentCore Runtime on {content['url']}, isolation: {content['isolation']}"]
    lines += [f"  export {name}={value}" for name, value in exports.items()]
    lines += [f"  {name}: {arn}" for name, arn in content["agents"].items()]
    print(*lines, sep="\n", flush=True)


class _Server(uvicorn.Server):
    """Serves until it should exit, and then ends the sessions at once.

    Running calls get the rest of their replies, or a 424. Ray replaces the handlers of signals, and uvicorn sets its own later.
    """

    def __init__(self, runtime: Runtime, app: RuntimeApp, on_started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(runtime.config.times.shutdown_grace_s) + AFTER_SESSIONS_S,
        )
        super().__init__(config)
        self._runtime, self._on_started = runtime, on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        sessions = asyncio.create_task(self._runtime.end_sessions())
        await super().shutdown(sockets)
        await sessions
