"""Starting and watching the processes of a sharded gateway.

The parent serves nothing: it holds the listening socket and its children.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .._open_files import raise_file_limit
from ..errors import ConfigError, GatewayError
from .acceptor import listen
from .config import GatewayConfig
from .server import Gateway
from .service import settle_memory, write_ready
from .sessions import store_secret
from .sharding import Shard, remove_folder

_START_S = 60.0


def serve_sharded(
    config: GatewayConfig, workers: int, *, ready_file: str | None = None, parent_pid: int | None = None
) -> None:
    """Run `workers` gateway processes behind one port until SIGTERM or SIGINT.

    Raises: ConfigError when the port is in use or the store was written with another number of processes;
    GatewayError when one of them dies, after stopping the others.
    """
    raise_file_limit()
    base = Path(config.store_dir or tempfile.mkdtemp(prefix="agentcore-rl-gateway-"))
    base.mkdir(parents=True, exist_ok=True)
    _check_count(base, workers)
    secret, key = store_secret(base), secrets.token_urlsafe(24)
    listening = listen(config.host, config.port)
    folder = Path(tempfile.mkdtemp(prefix="agentcore-rl-shards-"))
    # A child needs nothing of its parent but the socket and these values; there are no threads yet, so forking is safe.
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    children = []
    for index in range(workers):
        mine, theirs = context.Pipe()
        one = dataclasses.replace(config, store_dir=str(base / f"shard-{index}"))
        shard = Shard(index, workers, folder, key)
        child = context.Process(target=_child, args=(one, shard, listening, theirs, secret, os.getpid()), daemon=True)
        child.start()
        theirs.close()
        pipes.append(mine)
        children.append(child)
    stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        urls = [_told(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(urls)
        for pipe in pipes:
            _told(pipe)
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if ready_file is not None:
            pids = [child.pid for child in children]
            write_ready(Path(ready_file), {"url": url, "pid": os.getpid(), "workers": pids})
        print(f"gateway listening on {url} with {workers} processes", file=sys.stderr, flush=True)
        while not stopping:
            gone = wait([child.sentinel for child in children], timeout=0.5)
            if gone and not stopping:
                raise GatewayError("a process of the gateway died; the others are stopped, what was answered is stored")
            if parent_pid is not None and not _alive(parent_pid):
                break
    finally:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + 10
        for child in children:
            child.join(max(0.1, deadline - time.monotonic()))
            if child.is_alive():
                child.kill()
        listening.close()
        remove_folder(folder)
        if config.store_dir is None:
            shutil.rmtree(base, ignore_errors=True)


def _check_count(base: Path, workers: int) -> None:
    """A session's process is found by hashing, so the number of processes belongs to the store."""
    note = base / "processes"
    if note.exists():
        if note.read_text().strip() != str(workers):
            raise ConfigError(
                f"{base} was written by {note.read_text().strip()} processes; start with --workers as many"
            )
    elif list(base.glob("calls-*.log")):
        raise ConfigError(f"{base} was written by a single process; leave --workers out, or take a new --store")
    else:
        note.write_text(str(workers))


def _told(pipe: Connection) -> Any:
    if not pipe.poll(_START_S):
        raise GatewayError("a process of the gateway did not start in time")
    try:
        told = pipe.recv()
    except EOFError as e:
        raise GatewayError("a process of the gateway died while starting; see above") from e
    if isinstance(told, Exception):
        raise told
    return told


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _child(
    config: GatewayConfig, shard: Shard, listening: socket.socket, pipe: Connection, secret: bytes, parent: int
) -> None:
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        runner.run(_serve(config, shard, listening, pipe, secret, parent))


async def _serve(
    config: GatewayConfig, shard: Shard, listening: socket.socket, pipe: Connection, secret: bytes, parent: int
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        gateway = Gateway(config, shard=shard, secret=secret)
        pipe.send(await gateway.start_private())
        shard.urls = await loop.run_in_executor(None, pipe.recv)
        await gateway.start(sock=listening)
    except Exception as e:
        pipe.send(e)
        return
    pipe.send(True)
    settle_memory()
    while not stop.is_set():
        try:
            async with asyncio.timeout(1.0):
                await stop.wait()
        except TimeoutError:
            if os.getppid() != parent:
                break
    await gateway.stop()
