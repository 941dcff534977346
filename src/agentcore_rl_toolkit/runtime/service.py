"""Run a local runtime as a process: bind, load agents, write the ready file, stop on a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from ..errors import ConfigError
from .config import RuntimeConfig
from .core import Runtime
from .server import RuntimeApp

PARENT_CHECK_S = 1.0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: ConfigError that names the port when it is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {e.strerror}. Use --port 0 to take any free port."
        ) from e
    return listener


def write_ready_file(path: Path, content: dict[str, object]) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def run(config: RuntimeConfig, agents: Sequence[tuple[str, Path]], **options: Any) -> None:
    """Blocking form of `serve` on uvloop; the options are its keywords."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, agents, **options))


async def serve(
    config: RuntimeConfig,
    agents: Sequence[tuple[str, Path]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready_file: Path | None = None,
    parent_pid: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the parent is gone. Raises: ConfigError, AgentLoadError."""
    listener = bind(host, port)
    runtime = Runtime(config)
    loop = asyncio.get_running_loop()
    loading = asyncio.ensure_future(runtime.start(list(agents)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, loading.cancel)
    try:
        arns = await loading
    except BaseException as e:
        await runtime.close()
        listener.close()
        if isinstance(e, asyncio.CancelledError) and loading.cancelled():
            return  # told to stop while loading
        raise
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        # uvicorn raises the signal again after its shutdown; a graceful stop is exit status 0 here.
        signal.signal(number, lambda signum, frame: None)
    server = uvicorn.Server(
        uvicorn.Config(
            RuntimeApp(runtime),
            http="httptools",
            ws="websockets-sansio",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(config.shutdown_grace_s),
        )
    )
    url = f"http://{host if ':' not in host else f'[{host}]'}:{listener.getsockname()[1]}"
    watch = asyncio.create_task(_watch(server, url, arns, ready_file, parent_pid))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        _forget(ready_file)


def _forget(ready_file: Path | None) -> None:
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)


async def _watch(
    server: uvicorn.Server, url: str, arns: dict[str, str], ready_file: Path | None, parent_pid: int | None
) -> None:
    while not server.started:  # noqa: ASYNC110  # uvicorn has a flag, no event
        await asyncio.sleep(0.005)
    if ready_file is not None:
        write_ready_file(ready_file, {"url": url, "pid": os.getpid(), "agents": arns})
    print(f"AgentCore Runtime on {url}", flush=True)
    print(f"  export AWS_ENDPOINT_URL_BEDROCK_AGENTCORE={url}", flush=True)
    for name, arn in arns.items():
        print(f"  {name}: {arn}", flush=True)
    while parent_pid is not None:
        await asyncio.sleep(PARENT_CHECK_S)
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            server.should_exit = True
            return
        except PermissionError:
            continue
