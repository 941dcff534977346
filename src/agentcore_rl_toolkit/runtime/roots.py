"""Where a runtime keeps its files, and cleaning up after one that was killed.

Every server has a root folder of its own below the system's temporary folder, short enough for unix sockets, and holds
a lock in it.
A root, or a state folder, whose lock is free belongs to a server that is gone: its processes are found by a variable in
their environment and killed, then its folders go.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError
from .private_files import write_private

MARKER = "AGENTCORE_RL_RUNTIME"  # in the environment of every process a runtime starts: stands for its root folder
_LONGEST_BASE = 60  # a socket's path may have 103 bytes on macOS


def base_dir() -> Path:
    """The folder of all roots of this user, mode 0700. Raises: ConfigError when somebody else made it."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_BASE:
        parent = Path("/tmp")
    base = parent / f"agentcore-rl-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise ConfigError(f"{base} belongs to another user; set TMPDIR to a folder of your own")
    return base


class Locked:
    """A folder that one live process owns. The lock is the kernel's: it goes with the process, however that ends."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path = path
        self._file = file

    def release(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def lock(path: Path) -> Locked | None:
    """Own this folder, or None when a live process does."""
    file = (path / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return Locked(path, file)


def new_root() -> Locked:
    """A fresh root for this process; roots of servers that are gone are removed first."""
    base = base_dir()
    sweep(base)
    while True:
        root = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
        try:
            locked = lock(root)
        except FileNotFoundError:  # another server, which sweeps now, took it for one that is gone
            continue
        if locked is not None and root.exists():
            return locked


def sweep(base: Path) -> int:
    """Remove every root below ``base`` whose server is gone, with all of its processes. Returns how many."""
    count = 0
    for root in base.iterdir():
        try:
            locked = lock(root)
        except OSError:  # no folder, or gone meanwhile
            continue
        if locked is None:
            continue
        kill_marked(root)
        shutil.rmtree(root, ignore_errors=True)
        locked.release()
        count += 1
    return count


def own_state(path: Path) -> Locked:
    """Own a state folder and clear what a killed server left in it. Raises: ConfigError when it is in use."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    locked = lock(path)
    if locked is None:
        raise ConfigError(f"{path} is in use by another runtime; give each its own --state-dir")
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        previous = Path(json.loads((path / "server.json").read_text())["root"])
        kill_marked(previous)
    shutil.rmtree(path / "sessions", ignore_errors=True)
    return locked


def marker(root: Path) -> str:
    """What `MARKER` says in the processes of this root: not the path, which would lead a session to its neighbours'
    sockets."""
    return hashlib.sha256(str(root).encode()).hexdigest()[:24]


def kill_marked(root: Path) -> int:
    """Kill every process whose environment names this root (Linux; elsewhere their lifeline has ended them). Returns
    how many."""
    wanted = f"{MARKER}={marker(root)}".encode()
    count = 0
    for _ in range(20):  # a process may fork while we look
        found = [pid for pid, environment in _environments() if wanted in environment]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                count += 1
        time.sleep(0.02)
    return count


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    if not Path("/proc/self/environ").exists():
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{entry.name}/environ").read_bytes()
                if environment:  # a zombie has none
                    yield int(entry.name), environment.split(b"\0")


def describe_server(root: Path, content: dict[str, Any]) -> None:
    """Leave the address of a server in its root, for the command line to find."""
    write_private(root / "server.json", json.dumps(content))


def live_servers() -> list[dict[str, Any]]:
    """Servers of this user that are running, newest first."""
    found = []
    for file in base_dir().glob("*/server.json"):
        locked = lock(file.parent)
        if locked is not None:
            locked.release()
            continue
        with contextlib.suppress(OSError, ValueError):
            found.append((file.stat().st_mtime, json.loads(file.read_text())))
    return [content for _, content in sorted(found, key=lambda pair: -pair[0])]
