"""A system call filter for what Landlock does not know: changing the resource limits of another process.

`prlimit(2)` asks for the same user id only, so a session could take the descriptors from the runtime that serves it. A process
may set its own limits, which is the call for process 0; with any other number the call is refused with EPERM. For the calling
process and all it starts, irrevocable, at no cost to other calls: their verdict needs no arguments, and the kernel remembers it.

Source: Linux kernel documentation, userspace-api/seccomp_filter; include/uapi/linux/{seccomp,filter,audit}.h.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from dataclasses import dataclass

from . import calls

_SET_MODE_FILTER, _FLAG_SPEC_ALLOW = 1, 4
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD_WORD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_NUMBER, _ARCH, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32  # offsets in seccomp_data


@dataclass(frozen=True)
class _Machine:
    """``calls``: the numbers of prlimit64, by AUDIT_ARCH of the ways in which this machine can be called."""

    seccomp: int
    calls: dict[int, tuple[int, ...]]


_MACHINES = {
    # 64 bits, the same with 32-bit pointers (x32), and 32-bit programs
    "x86_64": _Machine(317, {0xC000003E: (302, 0x40000000 | 302), 0x40000003: (340,)}),
    "aarch64": _Machine(277, {0xC00000B7: (261,), 0x40000028: (369,)}),
}


@functools.cache
def available() -> bool:
    """Whether `restrict` can do anything on this machine."""
    known = sys.platform == "linux" and platform.machine() in _MACHINES and sys.byteorder == "little"
    return known and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def restrict() -> None:
    """Refuse this process, for good, to change limits of others. Does nothing where `available` says so. Raises: OSError."""
    if not available():
        return
    machine = _MACHINES[platform.machine()]
    program = _program(machine)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
    calls.syscall(machine.seccomp, _SET_MODE_FILTER, _FLAG_SPEC_ALLOW, header, what="seccomp")


def _program(machine: _Machine) -> bytes:
    """Classic BPF. Every block either falls through to the next one or jumps to a verdict at its own end."""
    code: list[bytes] = []
    for arch, numbers in machine.calls.items():
        for number in numbers:
            code += [
                _step(_LOAD_WORD, _ARCH),
                _step(_IF_EQUAL, arch, no=9),
                _step(_LOAD_WORD, _NUMBER),
                _step(_IF_EQUAL, number, no=7),
                _step(_LOAD_WORD, _FIRST_ARGUMENT),
                _step(_IF_EQUAL, 0, yes=5),  # itself
                _step(_LOAD_WORD, _THIRD_ARGUMENT),
                _step(_IF_EQUAL, 0, no=2),
                _step(_LOAD_WORD, _THIRD_ARGUMENT + 4),
                _step(_IF_EQUAL, 0, yes=1),  # no new limit: it only asks
                _step(_RETURN, _ERRNO | errno.EPERM),
            ]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(operation: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", operation, yes, no, value)
