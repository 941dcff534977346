"""The few system calls a launcher needs that Python does not wrap. On other systems they do nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Landlock: numbers of the system calls on all architectures, and rules that limit nothing but signals. Source: linux/landlock.h
CREATE_RULESET, RESTRICT_SELF = 444, 446
ONLY_SIGNALS = struct.pack("QQQ", 0, 0, 2)
_libc = ctypes.CDLL(None)


def set_memory_limit(memory_bytes: int | None) -> None:
    """Bound this process and its children. None means no bound. Core dumps are switched off either way.

    The bound is RLIMIT_DATA, private writable memory: RLIMIT_AS would count address space that numerical libraries, Node and a
    JVM reserve and never touch. macOS does not count mapped memory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        _libc.prctl(option, value)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel to send this signal when the parent thread ends. 0: no longer."""
    _prctl(PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that a process that left its group is still found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def keep_signals_inside() -> None:
    """Let this process and its later children signal only each other. Linux has this limit from 6.12 on."""
    rules = _libc.syscall(CREATE_RULESET, ONLY_SIGNALS, len(ONLY_SIGNALS), 0)
    if rules >= 0:
        _libc.syscall(RESTRICT_SELF, rules, 0)
        os.close(rules)


def children(pid: int | None = None) -> list[int]:
    """Return children of a process (default: this one), of all its threads. Empty if the kernel does not report them."""
    tasks = f"/proc/{os.getpid() if pid is None else pid}/task"
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            with contextlib.suppress(OSError), open(f"{tasks}/{task}/children") as f:
                found += map(int, f.read().split())
    return found


def kill_below(pid: int) -> None:
    """Kill everything that descends from a process, the process itself left out."""
    for child in children(pid):
        kill_below(child)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)


def thread_count() -> int | None:
    """Return the number of threads of this process, native ones included. None if the kernel does not report it."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None
