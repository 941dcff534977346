"""What /proc says of a process; None where there is no such process, or no /proc. Standard library only: agents' processes
use it too. Source: proc(5)."""

from __future__ import annotations

import os

STATE, PARENT, FLAGS, USER_TICKS, SYSTEM_TICKS, STARTED_TICKS, ENVIRONMENT_END = 0, 1, 6, 11, 12, 19, 48  # in `stat`
_KERNEL_THREAD = 0x200000  # in its flags


def stat(pid: int) -> list[str] | None:
    """The fields of ``stat`` after the program's name, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split() or None
    except OSError:
        return None


def parent(pid: int) -> int:
    """The process above one; 0 for a process that is gone."""
    fields = stat(pid)
    return 0 if fields is None else int(fields[PARENT])


def starts_program(pid: int) -> bool:
    """Whether it is between two programs (execve): its environment reads as empty, and will not be. A process that runs with an
    empty environment is not, nor one that ended or is the kernel's. Asks for a process whose environment may be read."""
    fields = stat(pid)
    if fields is None or fields[STATE] in "ZX" or int(fields[FLAGS]) & _KERNEL_THREAD:
        return False
    return len(fields) > ENVIRONMENT_END and fields[ENVIRONMENT_END] == "0"


def status(pid: int, name: str) -> list[str] | None:
    """The words of a line of ``status``."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as lines:
            return next((line.split()[1:] for line in lines if line.startswith(f"{name}:")), None)
    except OSError:
        return None


def pid_namespace(pid: int) -> int | None:
    """The number of its pid namespace."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None
