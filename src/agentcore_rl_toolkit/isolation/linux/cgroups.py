"""One control group per session, on cgroup v1 (as root) or in a delegated cgroup v2 subtree.

The child joins before it is confined (`attach`), because afterwards the hierarchy is out of its sight; whoever reaps the session
removes the group (`remove`). Groups left by a server that was killed name it (`owned`) and go with the next `sweep`.

Source: Linux kernel documentation, admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..._servers import procfs
from ..spec import Limits

_PERIOD_US = 100_000
_JOINING_S = 60.0
DYING_S = 10.0  # for killed processes to be gone: on a machine with twenty busy programs a kill takes seconds
_PARENT = "agentcore-rl"
_WANTED = ("memory", "pids", "cpu")
_OWNED = re.compile(r"of([0-9]+)\.([0-9]+)-")


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Where session groups go: ``version`` 1 has one directory per controller, version 2 one for all."""

    version: int
    parents: dict[str, Path]

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self.parents)

    def directories(self, name: str) -> list[Path]:
        return [parent / name for parent in dict.fromkeys(self.parents.values())]


_narrowed: Hierarchy | None = None


def narrow(group: str) -> list[Path]:
    """Keep to one group below the usual ones from now on, for a process that soon sees no other.

    Returns: its directories, which have to stay in sight. Empty where there is no usable hierarchy.
    """
    global _narrowed
    where = detect()
    if where is None:
        return []
    for parent in dict.fromkeys(where.parents.values()):
        (parent / group).mkdir(exist_ok=True)
        if where.version == 2:
            _write(parent / group / "cgroup.subtree_control", " ".join(f"+{c}" for c in sorted(where.parents)))
    _narrowed = Hierarchy(version=where.version, parents={c: p / group for c, p in where.parents.items()})
    return list(dict.fromkeys(_narrowed.parents.values()))


def detect() -> Hierarchy | None:
    """The usable hierarchy of this process, or None. Creates the parent directory, once per process."""
    return _narrowed if _narrowed is not None else _detect()


@functools.cache
def _detect() -> Hierarchy | None:
    if sys.platform != "linux":
        return None
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    return find(mounts, own)


def find(mountinfo: list[str], own_groups: list[str]) -> Hierarchy | None:
    """Pick the hierarchy out of the lines of ``/proc/self/mountinfo`` and ``/proc/self/cgroup``."""
    own: dict[str, str] = {}
    for line in own_groups:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    v1: dict[str, Path] = {}
    unified: Path | None = None
    for line in mountinfo:
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            for controller in set(options.split()[-1].split(",")) & set(_WANTED):
                v1[controller] = _below(point, root, own.get(controller, "/")) / _PARENT
        elif kind == "cgroup2" and "" in own:
            unified = _below(point, root, own[""])
    usable = {c: p for c, p in v1.items() if _make(p)}
    if usable:
        return Hierarchy(version=1, parents=usable)
    if unified is not None:
        return _delegated(unified)
    return None


def _below(point: str, root: str, own: str) -> Path:
    """The directory of group ``own`` under a mount at ``point`` that shows the hierarchy from ``root`` on."""
    relative = os.path.relpath(own, root) if root != "/" and own.startswith(root) else own.lstrip("/")
    return Path(point) / relative


def _delegated(group: Path) -> Hierarchy | None:
    """Use our own v2 group if it was delegated to us.

    A v2 group may not hold processes and give controllers to children at once, so this process (and its siblings in the group)
    move to a leaf first. Only done where the directory is writable, which is what delegation means.
    """
    try:
        offered = set((group / "cgroup.controllers").read_text().split()) & set(_WANTED)
        if not offered or not os.access(group / "cgroup.procs", os.W_OK) or not os.access(group, os.W_OK):
            return None
        leaf = group / f"{_PARENT}-server"
        leaf.mkdir(exist_ok=True)
        for pid in (group / "cgroup.procs").read_text().split():
            (leaf / "cgroup.procs").write_text(pid)
        parent = group / _PARENT
        for directory in (group, parent):
            directory.mkdir(exist_ok=True)
            (directory / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in sorted(offered)))
    except OSError:
        return None
    return Hierarchy(version=2, parents=dict.fromkeys(sorted(offered), parent))


def _make(parent: Path) -> bool:
    try:
        parent.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(parent, os.W_OK)


def settings(version: int, limits: Limits) -> dict[str, list[tuple[str, str]]]:
    """Files to write, by controller. Raises nothing; controllers without a limit are left out."""
    out: dict[str, list[tuple[str, str]]] = {}
    if limits.memory_bytes is not None:
        amount = str(limits.memory_bytes)
        out["memory"] = (
            [("memory.limit_in_bytes", amount), ("memory.memsw.limit_in_bytes", amount)]
            if version == 1
            else [("memory.max", amount), ("memory.swap.max", "0"), ("memory.oom.group", "1")]
        )
    if limits.processes is not None:
        out["pids"] = [("pids.max", str(limits.processes))]
    if limits.cpus is not None:
        quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
        out["cpu"] = (
            [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", quota)]
            if version == 1
            else [("cpu.max", f"{quota} {_PERIOD_US}")]
        )
    return out


_OPTIONAL = frozenset(
    {"memory.memsw.limit_in_bytes", "memory.swap.max", "memory.oom.group"}
)  # absent without swap accounting


def attach(name: str, limits: Limits) -> frozenset[str]:
    """Put this process into the group of session ``name``, created if need be.

    Returns: the controllers that now hold the limits; limits of others are the caller's to set as rlimits.
    """
    where = detect()
    if where is None:
        return frozenset()
    held: set[str] = set()
    joined: set[Path] = set()
    for controller, files in settings(where.version, limits).items():
        parent = where.parents.get(controller)
        if parent is None:
            continue
        group = parent / name
        group.mkdir(exist_ok=True)
        for file, value in files:
            try:
                _write(group / file, value)
            except OSError:
                if file not in _OPTIONAL:
                    raise
        if group not in joined:
            _write(group / "cgroup.procs", "0")
            joined.add(group)
        held.add(controller)
    return frozenset(held)


def _write(path: Path, value: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def out_of_memory_kills(name: str) -> int | None:
    """How often the kernel killed a process of the session for its memory limit; None where that is not counted."""
    where = detect()
    if where is None or "memory" not in where.parents:
        return None
    file = where.parents["memory"] / name / ("memory.oom_control" if where.version == 1 else "memory.events")
    try:
        counts = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def remove(name: str, hierarchy: Hierarchy | None = None) -> bool:
    """Remove the group of an ended session. Returns: False while a process still lives in it."""
    where = hierarchy or detect()
    gone = True
    for group in where.directories(name) if where else []:
        try:
            group.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def remove_all(names: Iterable[str], *, wait_s: float) -> bool:
    """Remove the groups of sessions whose processes were just killed. Returns: False when some live on. Blocks."""
    give_up_s = time.monotonic() + wait_s
    left = [name for name in names if not remove(name)]
    while left and time.monotonic() < give_up_s:
        time.sleep(0.02)
        left = [name for name in left if not remove(name)]
    return not left


def owned(group: str) -> str:
    """The name of a group that is not to be swept as long as this process lives.

    It names the process by number and start time: numbers come round again (by the kernel's default after 32,768).
    """
    return f"of{os.getpid()}.{_started(os.getpid())}-{group}"


def _started(pid: int) -> str | None:
    """When the process began, in clock ticks since the machine did; None when there is none."""
    fields = procfs.stat(pid)
    return None if fields is None else fields[procfs.STARTED_TICKS]


def remove_below(group: Path) -> bool:
    """Remove a group and those in it. Returns: False while a process still lives in one."""
    try:
        for inner in group.iterdir():
            if inner.is_dir():
                inner.rmdir()
        group.rmdir()
    except OSError:
        return False
    return True


def sweep(hierarchy: Hierarchy | None = None, *, wait_s: float = 0.0) -> int:
    """Remove groups that a killed launcher left: its own ones, by its number, and old ones without processes.

    Processes that were just killed still count for a moment: ``wait_s`` seconds, for all groups together, are they waited for.
    Returns: how many went.
    """
    where = hierarchy or detect()
    count = 0
    give_up_s = time.monotonic() + wait_s
    for parent in dict.fromkeys(where.parents.values()) if where else []:
        for group in parent.iterdir():
            try:
                owner = _OWNED.match(group.name)
                if owner is not None and group.is_dir():  # of a template with its sessions' in it, or of a session
                    if _started(int(owner[1])) != owner[2]:
                        count += remove_soon(group, give_up_s)
                elif group.is_dir() and time.time() - group.stat().st_mtime > _JOINING_S:
                    group.rmdir()
                    count += 1
            except OSError:
                continue  # in use, or gone already
    return count


def remove_soon(group: Path, give_up_s: float) -> bool:
    """Remove a group and those in it as soon as its processes, which were just killed, are gone. Blocks."""
    while not remove_below(group):
        if time.monotonic() >= give_up_s or not group.exists():
            return False
        time.sleep(0.02)
    return True
