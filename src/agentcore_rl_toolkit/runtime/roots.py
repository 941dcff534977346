"""Folders of runtimes. Each runtime has a root below the system's temporary folder, with a path short enough for unix sockets.

A runtime holds a lock in its root and in its state folder. A free lock means that the runtime was killed. The next runtime that
starts moves the objects of its sessions into its store, and removes its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from .._servers.locks import close_in_children
from .._servers.process import private_folder
from ..errors import ConfigError
from ..store.local import SessionFolder

STORE = "store"  # a link in a root: the folder of the runtime's store, where its sessions have folders
_LONGEST_BASE = 60  # a socket's path may have 103 bytes on macOS
_UNLOCKED_S = 60.0  # a root without a lock that is older than this has no owner


def remove(folder: Path) -> bool:
    """Remove a folder and all that is in it, of any depth and whatever its modes are. Blocks. Return True on success."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # both commands go down without recursion and without long paths
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
    return not folder.exists()


def base_dir() -> Path:
    """Return the folder of all roots of this user, mode 0700. Raises: ConfigError when another user owns it."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_BASE:
        parent = Path("/tmp")
    return private_folder(parent / f"agentcore-rl-{os.getuid()}")


class Locked(NamedTuple):
    """A folder that one live process owns. The lock is the kernel's: it goes with the process, however that ends."""

    path: Path
    file: IO[str]

    def release(self) -> None:
        self.file.close()


def lock(path: Path, *, create: bool = True) -> Locked | None:
    """Own this folder, or None when a live process does. Raises: OSError when there is no such folder, or no lock to take."""
    file = os.fdopen(os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600), "r+")
    close_in_children(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return Locked(path, file)


def new_root() -> Locked:
    """Create a root for this process. Remove those of runtimes that were killed. Blocks."""
    base = base_dir()
    for root in base.iterdir():
        with contextlib.suppress(OSError):  # no lock yet, or gone meanwhile
            gone = lock(root, create=time.time() - root.stat().st_mtime > _UNLOCKED_S)
            if gone is not None:
                discard_root(gone)
    while True:
        root = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base))
        with contextlib.suppress(FileNotFoundError):  # another runtime took it for a leftover
            locked = lock(root)
            if locked is not None and root.exists():
                return locked


def discard_root(root: Locked) -> None:
    """Remove a root. The records of sessions whose folders are left are moved into the store."""
    SessionFolder.merge_all(root.path / STORE, root.path.name)
    remove(root.path)
    root.release()


def own_state(path: Path) -> Locked:
    """Own a state folder, and remove the sessions that an ended runtime left in it. Blocks. Raises: ConfigError if in use."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    locked = lock(path)
    if locked is None or not remove(path / "sessions"):
        raise ConfigError(
            f"{path} is in use by another runtime, or its files cannot be removed; give another --state-dir"
        )
    return locked


def live_servers() -> list[dict[str, Any]]:
    """Return this user's runtimes that run, newest first."""
    found = []
    for file in base_dir().glob("*/server.json"):
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile
            locked = lock(file.parent, create=False)
            if locked is None:
                found.append((file.stat().st_mtime, json.loads(file.read_text())))
            else:
                locked.release()
    return [content for _, content in sorted(found, key=lambda pair: -pair[0])]
