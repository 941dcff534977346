"""The memory limit of a session, which the kernel holds for each of its processes. Standard library only, Python 3.10."""

from __future__ import annotations

import resource


def set_memory_limit(memory_bytes: int | None) -> None:
    """Bound this process and its children; None bounds nothing. Core dumps are switched off either way.

    The bound is RLIMIT_DATA, private writable memory: RLIMIT_AS would count address space that numerical libraries, Node and a
    JVM reserve and never touch. macOS does not count what is mapped.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
