"""The Linux calls that the standard library of Python 3.11 lacks, through ctypes.

Every function raises OSError with the call's name. Nothing here touches libc at import, so that other systems can import it.
Source: man pages namespaces(7), mount_setattr(2), move_mount(2), pivot_root(2), landlock(7), capabilities(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_REC, MS_PRIVATE = 0x4000, 0x40000
MNT_DETACH = 2

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_AT_FDCWD = -100
_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
# Numbers above 423 are the same on every architecture.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
_CAP_VERSION_3 = 0x20080522
_CAP_SYS_ADMIN = 21


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *args: object, what: str = "") -> int:
    return _checked(getattr(_libc(), name)(*args), what or name)


def syscall(number: int, *args: object, what: str) -> int:
    """A raw call; integers are passed as C longs."""
    widened = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _checked(_libc().syscall(ctypes.c_long(number), *widened), what)


def unshare(flags: int) -> None:
    _call("unshare", flags, what=f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    _call("setns", fd, flags, what=f"setns({flags:#x})")


def sethostname(name: str) -> None:
    raw = name.encode()
    _call("sethostname", raw, len(raw))


def prctl(option: int, value: int = 0, *, what: str = "prctl") -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), zero, zero, zero, what=what)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    _call(
        "mount",
        source.encode(),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode(),
        what=f"mount {kind or 'flags'} on {target}",
    )


def clone_mount(path: str, *, recursive: bool = True) -> int:
    """A detached copy of the mount at ``path`` as a file descriptor, to be placed with `place_mount`."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags, what=f"open_tree {path}")


def set_mount_flags(fd: int, attributes: int, *, recursive: bool = True) -> None:
    """Add ATTR_* flags to a mount and the mounts beneath it."""
    data = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    syscall(_SYS_MOUNT_SETATTR, fd, b"", flags, data, len(data), what="mount_setattr")


def place_mount(fd: int, target: str) -> None:
    """Attach a detached mount at ``target`` and close its descriptor."""
    try:
        syscall(
            _SYS_MOVE_MOUNT,
            fd,
            b"",
            _AT_FDCWD,
            os.fsencode(target),
            _MOVE_MOUNT_F_EMPTY_PATH,
            what=f"move_mount {target}",
        )
    finally:
        os.close(fd)


def enter_root(new_root: str) -> None:
    """Make ``new_root``, a mount point, the root and drop the old one from this mount namespace."""
    os.chdir(new_root)
    # pivot_root(".", ".") stacks the old root over the new one, from where it is detached: no directory for it is needed.
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def has_sys_admin() -> bool:
    """Whether this process may create namespaces without a user namespace."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def drop_capabilities() -> None:
    """Give up every capability for good and forbid regaining any through exec."""
    prctl(PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one this kernel knows, or none was held to begin with
    with contextlib.suppress(OSError):  # kernels before 4.3 have no ambient set
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    _call("capset", header, bytes(24))
