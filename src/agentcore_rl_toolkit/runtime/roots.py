"""Where a runtime keeps its files, and cleaning up after one that was killed.

Every server has a root folder of its own below the system's temporary folder, short enough for unix sockets, and holds
a lock in it.
A root, or a state folder, whose lock is free belongs to a server that is gone: its processes are found by a variable in
their environment and killed, then its folders go. Its templates have time before that: they end their sessions and remove
the folders of those, also from a state folder, which whoever clears the root does not touch. What cannot be removed is moved
into a folder `kept` beside it, logged once, and tried again at every later start: whatever sessions leave, it keeps no server
from starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from .._servers import procfs
from .._servers.process import write_private
from ..errors import ConfigError
from .launcher import TEMPLATE_MODULE, trees

log = logging.getLogger(__name__)
MARKER = "AGENTCORE_RL_RUNTIME"  # in the environment of every process a runtime starts: stands for its root folder
_LONGEST_BASE = 60  # a socket's path may have 103 bytes on macOS
KEPT = "kept"
START_S, STOP_S = 20.0, 5.0  # for removing what others left, at a start, and what is our own, at the end
STARTING_S = 5.0  # for a process that is starting a program to show its environment
TEMPLATES_S = 10.0  # for the templates of a server that was killed to clean up after it
_UNLOCKED_S = 60.0  # the age from which a root without a lock is nobody's
_LONGEST_DESCRIPTION = 1_000_000  # bytes of a server.json


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
        """Remove the folder and everything in it; what is too much for now goes with the next server's start."""
        trees.remove(self.path, within_s=STOP_S)
        self._file.close()


def lock(path: Path, *, create: bool = True) -> Locked | None:
    """Own this folder, or None when a live process does. Raises: OSError when there is no such folder, or no lock to take."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    file = os.fdopen(os.open(path / "lock", flags, 0o600), "r+")
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
        if locked is not None:
            if root.exists():
                return locked
            locked.release()  # it was swept between its making and its lock


def sweep(base: Path) -> int:
    """Remove every root below ``base`` whose server is gone, with all of its processes. Returns how many."""
    count = 0
    until_s = time.monotonic() + START_S
    _clear_kept(base, until_s)
    gone = []
    for root in base.iterdir():
        if root.name != KEPT and (locked := _take_over(root)) is not None:
            locked.release()  # nobody else need wait with us
            gone.append(root)
    let_templates_end(gone)
    for root in gone:
        locked = _take_over(root)
        if locked is None:
            continue
        kill_marked(root)
        clear(root, until_s)
        locked.release()
        count += 1
    return count


def _take_over(root: Path) -> Locked | None:
    """Own the root of a server that is gone; None where it lives, or somebody makes or removes the root just now."""
    try:
        return lock(root, create=time.time() - root.lstat().st_mtime > _UNLOCKED_S)
    except OSError:  # no folder, no lock yet, or gone meanwhile
        return None


def own_state(path: Path) -> tuple[Locked, Path]:
    """Own a state folder and clear what a killed server left in it. Returns: also the empty folder for sessions in it.

    Raises: ConfigError when it is in use.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    locked = lock(path)
    if locked is None:
        raise ConfigError(f"{path} is in use by another runtime; give each its own --state-dir")
    previous = _described(path / "server.json").get("root")
    if isinstance(previous, str):
        _kill_if_gone(Path(previous))
    until_s = time.monotonic() + START_S
    _clear_kept(path, until_s)
    sessions = path / "sessions"
    if not clear(sessions, until_s):
        sessions = Path(tempfile.mkdtemp(prefix="sessions-", dir=path))
    sessions.mkdir(mode=0o700, exist_ok=True)
    return locked, sessions


def _kill_if_gone(root: Path) -> None:
    """End the processes of a server that a state folder names, unless it lives: a copied folder names a neighbour's."""
    try:
        locked = lock(root, create=False)
    except (OSError, ValueError):  # it ended in order, or another server has cleared it, processes first
        return
    if locked is None:
        log.warning(
            "the state folder names the runtime in %s, which is running and not its own; it is left alone", root
        )
        return
    locked.release()
    let_templates_end([root])
    with contextlib.suppress(OSError):  # gone meanwhile
        locked = lock(root, create=False)
        if locked is not None:
            kill_marked(root)
            locked.release()


def clear(folder: Path, until_s: float) -> bool:
    """Remove a folder that somebody left behind, or move what cannot be removed into `KEPT` beside it, and say so.

    Returns: whether the name is free.
    """
    kept = folder.parent / KEPT
    aside = kept / f"{time.time_ns()}-{folder.name}"
    why = trees.remove(folder, within_s=max(0.1, until_s - time.monotonic()))
    if why is None:
        return True
    try:
        kept.mkdir(mode=0o700, exist_ok=True)
        folder.rename(aside)
    except FileNotFoundError:  # somebody else removed it meanwhile
        return True
    except OSError as e:
        log.warning("%s cannot be removed (%s), nor moved away (%s)", folder, why, e.strerror)
        return False
    log.warning("what an ended runtime left in %s cannot be removed (%s); it is kept as %s", folder, why, aside)
    return True


def _clear_kept(base: Path, until_s: float) -> None:
    """Try again, quietly: what could not be removed was logged when it was put there."""
    kept = base / KEPT
    try:
        left = os.listdir(kept)
    except OSError:
        return
    for name in left:
        if time.monotonic() < until_s:
            trees.remove(kept / name, within_s=max(0.1, until_s - time.monotonic()))
    with contextlib.suppress(OSError):
        kept.rmdir()


def _described(file: Path) -> dict[str, Any]:
    """What a `server.json` says; nothing where it is none."""
    try:
        with os.fdopen(trees.open_file(file), "rb") as f:
            content = json.loads(f.read(_LONGEST_DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def marker(root: Path) -> str:
    """What `MARKER` says in the processes of this root: not the path, which would lead a session to its neighbours'
    sockets."""
    return hashlib.sha256(str(root).encode()).hexdigest()[:24]


def let_templates_end(gone: Sequence[Path]) -> None:
    """Wait, for at most `TEMPLATES_S`, until no template of the servers that had these roots is left (Linux)."""
    wanted = {f"{MARKER}={marker(root)}".encode() for root in gone}
    until_s = time.monotonic() + TEMPLATES_S
    while wanted and time.monotonic() < until_s:
        if not any(not wanted.isdisjoint(found) and _is_template(pid) for pid, found in _environments()):
            return
        time.sleep(0.02)


def _is_template(pid: int) -> bool:
    """Whether it is a template, or a session that was forked from one."""
    try:
        return TEMPLATE_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


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
    """The environment of every other process."""
    if Path("/proc/self/environ").exists():
        pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
        yield from _shown([pid for pid in pids if pid != os.getpid()])


def _shown(pids: Sequence[int]) -> Iterator[tuple[int, list[bytes]]]:
    """The environments of these processes, where they have one. Who starts a program just now has none to show for a moment,
    which is long where it has to wait for a core: it is looked at until it has, for `STARTING_S` at most."""
    until_s = time.monotonic() + STARTING_S
    while pids:
        starting = []
        for pid in pids:
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if environment:
                    yield pid, environment.split(b"\0")
                elif procfs.starts_program(pid):
                    starting.append(pid)
        pids = starting if time.monotonic() < until_s else []
        if pids:
            time.sleep(0.002)


def describe_server(root: Path, content: dict[str, Any]) -> None:
    """Leave the address of a server in its root, for the command line to find."""
    write_private(root / "server.json", json.dumps(content))


def live_servers() -> list[dict[str, Any]]:
    """Servers of this user that are running, newest first."""
    found = []
    for file in base_dir().glob("*/server.json"):
        try:
            locked = lock(file.parent, create=False)
            if locked is not None:
                locked.release()
                continue
            content = _described(file)
            if isinstance(content.get("url"), str):
                found.append((file.stat().st_mtime, content))
        except OSError:  # gone meanwhile
            continue
    return [content for _, content in sorted(found, key=lambda pair: -pair[0])]
