"""Gives a session its own writable view of the agent's project. Standard library only, Python 3.10.

Theory of operation. In the sandbox the project is read-only and the same for all sessions of an agent version. A forked session
makes a user namespace and a mount namespace, and builds the project again on its own tmpfs: an overlay for each folder, and a
copy of each file that the sandbox mounts by itself. /tmp, /dev/shm and the home folder of the agent's file are overlays, too.
What the session writes stays on the tmpfs and ends with it. Of the folders of all sessions (sessions, logs, sockets) and the
store, it sees only its own part.
A folder is one overlay where no other mount lies below it. `Cover` mounts the entries of a folder with hidden files one by
one, so such a folder is built entry by entry.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Collection
from pathlib import Path

SCRATCH = "/.view"  # a folder of the sandbox, which is covered while a view is built
TMP, SHM = "/tmp", "/dev/shm"
BARE_TMP = "/.tmp"  # /tmp without its inner mounts, which allow no overlay. It is missing if /tmp is this machine's.
MAX_BYTES = 2**30  # limit of what a session writes to its view, which is memory
MAX_FILES = 2**18  # limit of the files that it makes there. Each takes about 1 KiB of the kernel's memory.
MAX_COPIED_BYTES = 2**25  # limit of a session's copied files. The other files stay read-only.
EMPTIED_BYTES = 2**16  # size of a folder that is empty except for mount points
MAX_ENTRIES = 500  # a larger folder that has hidden files in it stays read-only
_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_BIND, _RECURSIVE, _NOTHING_SET, _DETACH = 4096, 16384, 0, 2  # MS_BIND, MS_REC, no flag, MNT_DETACH
_READ_ONLY = _BIND | 32 | 1 | 2 | 4  # MS_REMOUNT, MS_RDONLY, and MS_NOSUID and MS_NODEV, which Bubblewrap has set
_DROP_FROM_BOUNDING_SET, _SYS_ADMIN = 24, 21  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_libc = ctypes.CDLL(None, use_errno=True)


def make(
    project: str, *, home: str | None = None, emptied: Collection[str] = (), own: Collection[tuple[str, str]] = ()
) -> list[str]:
    """Replace the project with a view of this process, which must have one thread. Raises: OSError.

    ``home``: the home folder of the agent's file, in which libraries keep caches. ``emptied``: folders of all sessions, which
    are empty in the view. ``own``: paths, also in these, and the folders that the view has there.

    Returns the folders that all sessions share, because the kernel allows no overlay there.
    """
    folder = os.getcwd()
    _enter_namespaces()
    _mount("view", SCRATCH, "tmpfs", _NOTHING_SET, f"size={MAX_BYTES},nr_inodes={MAX_FILES},mode=700")
    builder = _Builder(_mount_points(project))
    builder.build(project, f"{SCRATCH}/project")
    _mount(f"{SCRATCH}/project", project, None, _BIND | _RECURSIVE)
    sources = [(path, os.open(source, os.O_PATH | os.O_CLOEXEC)) for path, source in own]
    for path in emptied:
        _mount("emptied", path, "tmpfs", _NOTHING_SET, f"size={EMPTIED_BYTES},mode=700")
    for path, source in sources:
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{source}", path, None, _BIND)
        os.close(source)
    if home is not None:
        builder.overlay(home, f"{SCRATCH}/home")
        _bind_inner(home, f"{SCRATCH}/home", ())
        _mount(f"{SCRATCH}/home", home, None, _BIND | _RECURSIVE)
    if os.path.isdir(BARE_TMP):
        builder.overlay(BARE_TMP, f"{SCRATCH}/tmp")
        if BARE_TMP not in builder.refused:
            _bind_inner(TMP, f"{SCRATCH}/tmp", _mount_points(TMP))
            _mount(f"{SCRATCH}/tmp", TMP, None, _BIND | _RECURSIVE)
    if not _mount_points(SHM):
        builder.overlay(SHM, f"{SCRATCH}/shm")
        _mount(f"{SCRATCH}/shm", SHM, None, _BIND)
    else:
        _mount(SHM, SHM, None, _BIND | _RECURSIVE)  # as the agent's file sees it, and not read-only as /dev
    _mount("/dev", "/dev", None, _READ_ONLY)  # it is memory without a limit, and all sessions would write to it
    _call(_libc.umount2, os.fsencode(SCRATCH), _DETACH)
    os.chdir(folder)  # a folder in the project is another one now
    _give_up_mounting()
    return [TMP if path == BARE_TMP else path for path in builder.refused]


def join(pid: int) -> None:
    """Enter the view of another process, a session. Raises: OSError."""
    for name in ("user", "mnt"):
        namespace = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        _call(_libc.setns, namespace, 0)
        os.close(namespace)
    _give_up_mounting()


def try_out(project: str, home: str | None = None) -> tuple[str | None, list[str]]:
    """Make a view of this project in a child.

    Returns why the kernel allows no view, or None if it allows one, and the folders of `make`.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps([None, make(project, home=home)]).encode())
        except BaseException as e:
            os.write(writing, json.dumps([str(e)[:500], []]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    why, refused = json.loads(text) if text else ("the kernel ended the attempt", [])
    return why, refused


class _Builder:
    """Builds folders on a tmpfs. ``mounts``: the mount points of the project, and whether each is writable."""

    def __init__(self, mounts: dict[str, bool]) -> None:
        self._mounts, self._overlays, self._bytes_left = mounts, 0, MAX_COPIED_BYTES
        self.refused: list[str] = []  # folders without an overlay

    def build(self, path: str, target: str) -> None:
        """Show ``path`` at ``target``, which does not exist yet."""
        inner = any(name.startswith(f"{path}/") for name in self._mounts)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
        elif not os.path.isdir(path):
            self._build_file(path, target)
        elif self._mounts.get(path, False) or (inner and len(os.listdir(path)) > MAX_ENTRIES):
            os.mkdir(target)
            _mount(path, target, None, _BIND | _RECURSIVE)
        elif inner:
            os.mkdir(target)
            shutil.copystat(path, target)
            for name in sorted(os.listdir(path)):
                self.build(f"{path}/{name}", f"{target}/{name}")
        else:
            self.overlay(path, target)

    def _build_file(self, path: str, target: str) -> None:
        if os.path.isfile(path) and not self._mounts.get(path, False):
            size = os.path.getsize(path)
            if size <= self._bytes_left:
                with contextlib.suppress(PermissionError):  # the session may not read it either
                    shutil.copy2(path, target)
                    self._bytes_left -= size
                    return
        open(target, "w").close()
        _mount(path, target, None, _BIND)

    def overlay(self, path: str, target: str) -> None:
        """Show a folder that has no inner mounts at ``target``, which does not exist yet."""
        self._overlays += 1
        upper, work = (f"{SCRATCH}/{kind}{self._overlays}" for kind in ("upper", "work"))
        for made in (target, upper, work):
            os.mkdir(made)
        shutil.copystat(path, upper)
        lower = os.open(path, os.O_PATH | os.O_CLOEXEC)  # a path in the options would need escapes
        options = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work},userxattr"
        try:
            _mount("overlay", target, "overlay", _NOTHING_SET, options)
        except OSError:
            if self._overlays == 1:  # the kernel or this file system allows none
                raise
            self.refused.append(path)
            _mount(path, target, None, _BIND | _RECURSIVE)
        finally:
            os.close(lower)


def _mount_points(project: str) -> dict[str, bool]:
    """Return the mount points at and below a folder, and whether each is writable."""
    found = {}
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.split(b" ")
            path = re.sub(rb"\\([0-7]{3})", lambda escape: bytes([int(escape[1], 8)]), fields[4])
            name = os.fsdecode(path)
            if name == project or name.startswith(f"{project}/"):
                found[name] = b"rw" in fields[5].split(b",")
    return found


def _bind_inner(folder: str, target: str, mounts: Collection[str]) -> None:
    """Bind the mounts in a folder, and the sockets and pipes, to which an overlay makes no connection, in its overlay."""
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # a child may remove its files meanwhile
            if entry.path in mounts or not (entry.is_symlink() or entry.is_file() or entry.is_dir()):
                _mount(entry.path, f"{target}/{entry.name}", None, _BIND | _RECURSIVE)
            elif entry.is_dir(follow_symlinks=False):
                _bind_inner(entry.path, f"{target}/{entry.name}", mounts)


def _enter_namespaces() -> None:
    """Enter a user namespace with the users of this one, and a mount namespace.

    Only from outside can root map all users. A shell does that: it starts in a millisecond, and a fork of this process would copy
    its page tables.
    """
    users, groups = (_ids_of(name) for name in ("uid_map", "gid_map"))
    if os.geteuid() != 0:
        _call(_libc.unshare, _NEW_USERS | _NEW_MOUNTS)
        Path("/proc/self/setgroups").write_text("deny")  # the kernel's condition for a map of one group
        Path("/proc/self/uid_map").write_text(users)
        Path("/proc/self/gid_map").write_text(groups)
        return
    reading, writing = os.pipe()
    script = 'read go && printf %s "$2" >/proc/$1/uid_map && printf %s "$3" >/proc/$1/gid_map'
    words = ["/bin/sh", "-c", script, "sh", str(os.getpid()), users, groups]
    child = os.posix_spawn(words[0], words, {}, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)])
    os.close(reading)
    try:
        _call(_libc.unshare, _NEW_USERS | _NEW_MOUNTS)
        os.write(writing, b"go\n")
    finally:
        os.close(writing)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise OSError(f"the users of a namespace could not be mapped (status {status})")


def _ids_of(name: str) -> str:
    """Return a map that keeps the ids of this namespace."""
    with open(f"/proc/self/{name}") as table:
        ranges = [line.split() for line in table]
    return "".join(f"{first} {first} {count}\n" for first, _, count in ranges)


def _give_up_mounting() -> None:
    """Lose the right to mount and unmount here: root could uncover hidden files with it. Others lose all rights."""
    _call(_libc.prctl, _DROP_FROM_BOUNDING_SET, _SYS_ADMIN, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(24)
    _call(_libc.capget, header, data)
    kept = ~(1 << _SYS_ADMIN) & 0xFFFFFFFF if os.geteuid() == 0 else 0
    words = struct.unpack("=6I", data.raw[:24])
    low, high = [word & kept for word in words[:3]], [word if kept else 0 for word in words[3:]]
    _call(_libc.capset, header, ctypes.create_string_buffer(struct.pack("=6I", *low, *high)))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _call(_libc.mount, words[0], words[1], words[2], ctypes.c_ulong(flags), words[3], path=target)


def _call(function: Callable[..., int], *arguments: object, path: str | None = None) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        name = getattr(function, "__name__", "a system call")
        raise OSError(number, f"{name}: {os.strerror(number)}", path)
