"""The life of a server process: it listens, writes its address into a ready file, and ends with its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError

BACKLOG = 4096  # the default of 100 makes the kernel drop connection attempts of a burst, each then repeated after 1 s
PARENT_CHECK_S = 0.5


def bind(host: str, port: int, *, listening: bool = False) -> socket.socket:
    """Bind a socket. Port 0 takes a free one. Raises: ConfigError that names the port when it is taken."""
    bound: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if listening:  # fails if another process listens there, on all addresses for instance
            bound.listen(BACKLOG)
    except OSError as e:
        if bound is not None:
            bound.close()
        problem = f"cannot listen on {host} port {port}: {e.strerror}"
        raise ConfigError(f"{problem}. Use another port, or 0 for a free one.") from e
    return bound


def listen(host: str, port: int) -> socket.socket:
    return bind(host, port, listening=True)


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server of asyncio. A connection that it accepted just before is by then known to its protocol or handler.

    asyncio makes connections of accepted sockets one turn later, and a server that was closed in between drops them unclosed.
    """
    loop = server.get_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(3):  # the connection opens, its protocol starts, its handler takes the first step
        await asyncio.sleep(0)
    server.close()


async def break_off(send: Any) -> None:
    """End the caller's connection without a complete response.

    ASGI has no message for this. uvicorn's ``send`` is a method of the object that has the transport.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise ConnectionResetError("the connection is to be broken off")
    transport.abort()
    await asyncio.sleep(0.001)  # uvicorn hears of it from the loop, and expects no response then


def url_of(sock: socket.socket) -> str:
    host, port, *_ = sock.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step. It has mode 0600 from its beginning. Raises: OSError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(text)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can read. Raises: ConfigError when another user can, or made it."""
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"{path} is not this user's alone; set TMPDIR to your own folder")
    return path


def write_ready(path: Path, content: dict[str, Any]) -> None:
    """Write the file that says that the server listens, and where. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, json.dumps(content))


async def parent_gone(pid: int) -> None:
    """Return when the process ``pid`` has ended."""
    ours = os.getppid() == pid
    # A zombie parent still answers signal 0, but its children have been given to another process.
    while not (ours and os.getppid() != pid) and _exists(pid):  # noqa: ASYNC110  # of another process there is no event
        await asyncio.sleep(PARENT_CHECK_S)


def stop_event(parent_pid: int | None) -> asyncio.Event:
    """Return an event that is set by SIGTERM, SIGINT or the end of the process ``parent_pid``."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent_pid is not None:
        asyncio.ensure_future(parent_gone(parent_pid)).add_done_callback(lambda _: stop.set())
    return stop


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """End the block on SIGTERM and SIGHUP as on Ctrl-C, also in a background process, where Ctrl-C is ignored.

    `nohup` keeps its effect. On other threads than the main one, nothing changes.
    """

    def interrupt(number: int, frame: Any) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, interrupt) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as e:
        return isinstance(e, PermissionError)
    return True
