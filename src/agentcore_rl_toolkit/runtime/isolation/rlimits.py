"""Resource limits of the process itself: the floor under every tier, and all there is where control groups are not usable."""

from __future__ import annotations

import resource
import sys
from collections.abc import Collection

from .spec import Limits


def apply(limits: Limits, held_by_groups: Collection[str] = ()) -> None:
    """Set the rlimits for ``limits``, leaving out what control groups (``memory``, ``pids``) already bound.

    Memory is bounded as RLIMIT_DATA, private writable memory: RLIMIT_AS would count address space that numerical libraries
    reserve and never touch. It holds per process, not per session. Core dumps are switched off.
    """
    wanted: list[tuple[int, int]] = [(resource.RLIMIT_CORE, 0)]
    if limits.memory_bytes is not None and "memory" not in held_by_groups:
        wanted.append((resource.RLIMIT_DATA, limits.memory_bytes))
    if limits.processes is not None and "pids" not in held_by_groups:
        wanted.append((resource.RLIMIT_NPROC, limits.processes))
    if limits.file_bytes is not None:
        wanted.append((resource.RLIMIT_FSIZE, limits.file_bytes))
    if limits.open_files is not None:
        wanted.append((resource.RLIMIT_NOFILE, limits.open_files))
    for kind, value in wanted:
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def enforceable() -> frozenset[str]:
    """Names of `Limits` that rlimits can hold on this system, per process."""
    names = {"file_bytes", "open_files", "processes"}
    if sys.platform == "linux":
        names.add("memory_bytes")  # RLIMIT_DATA covers mmap since Linux 4.7; macOS ignores it for mmap
    return frozenset(names)
