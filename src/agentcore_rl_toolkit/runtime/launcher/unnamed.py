"""The disk taken by files that have no name any more: removed, and still held open or mapped by a session's processes.

Linux only; elsewhere nothing is found. Source: proc(5), `/proc/PID/fd` and `/proc/PID/map_files`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..._servers.procfs import parent, pid_namespace

K = TypeVar("K")
_GONE = " (deleted)"


def unnamed_bytes(top: int, sessions: Mapping[K, tuple[int | None, str]], devices: Iterable[int]) -> dict[K, int]:
    """Bytes by session, of files on one of ``devices`` (``st_dev``), each counted once.

    ``top``: the process that all of theirs descend from. ``sessions``: each one's process, and its folder. A file is its
    session's whose process holds it: one that descends from its own, or shares its pid namespace. Of others, commands beside
    sessions for instance, it is the session's in whose folder it was. A process that hides its descriptors from this user
    (not from root) is not looked into.
    """
    on = frozenset(devices)
    owners = {pid: key for key, (pid, _) in sessions.items() if pid is not None}
    spaces = {space: key for pid, key in owners.items() if (space := pid_namespace(pid)) != pid_namespace(top)}
    held: dict[K, dict[tuple[int, int], int]] = {key: {} for key in sessions}
    for pid, way in _descendants(top).items():
        owner = next((owners[p] for p in way if p in owners), None)
        if owner is None:
            owner = spaces.get(pid_namespace(pid))
        for path, identity, size in _held_by(pid, on):
            key = owner if owner is not None else _by_folder(path, sessions)
            if key is not None:
                held[key][identity] = max(size, held[key].get(identity, 0))
    return {key: sum(files.values()) for key, files in held.items()}


def _by_folder(path: str, sessions: Mapping[K, tuple[int | None, str]]) -> K | None:
    return next((key for key, (_, folder) in sessions.items() if path.startswith(folder + "/")), None)


def _descendants(top: int) -> dict[int, list[int]]:
    """Every process below ``top``, with the way up: itself first."""
    parents: dict[int, int] = {}
    for name in _listed("/proc"):
        if name.isdigit() and (above := parent(int(name))):
            parents[int(name)] = above
    ways: dict[int, list[int]] = {}
    for pid in parents:
        way, above = [pid], parents[pid]
        while above not in (0, top) and above in parents and len(way) < len(parents):
            way.append(above)
            above = parents[above]
        if above == top:
            ways[pid] = way
    return ways


def _held_by(pid: int, devices: frozenset[int]) -> list[tuple[str, tuple[int, int], int]]:
    """Path, device and inode, and bytes of the nameless files that a process has open or mapped."""
    found = []
    for name in _listed(f"/proc/{pid}/fd"):
        entry = f"/proc/{pid}/fd/{name}"
        try:
            path = os.readlink(entry)
            if not path.endswith(_GONE):
                continue
        except OSError as e:
            if e.errno != 36:  # ENAMETOOLONG: it was deeper than any path
                continue
            path = ""
        try:
            info = os.stat(entry)
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and info.st_dev in devices:
            found.append((path, (info.st_dev, info.st_ino), info.st_blocks * 512))
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
            mapped = [line.rstrip("\n").split(maxsplit=5) for line in lines if line.endswith(_GONE + "\n")]
    except OSError:
        mapped = []
    for fields in mapped:
        major, minor = (int(part, 16) for part in fields[3].split(":"))
        device, inode = os.makedev(major, minor), int(fields[4])
        if device not in devices:
            continue
        try:
            size = os.stat(f"/proc/{pid}/map_files/{fields[0]}").st_blocks * 512
        except OSError:  # only root may: what is mapped of it is there at least
            first, last = (int(part, 16) for part in fields[0].split("-"))
            size = int(fields[2], 16) + last - first
        found.append((fields[5], (device, inode), size))
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
