"""Confinement by Landlock: no privilege, no namespaces, for the calling process and all it starts, irrevocable.

Source: Linux kernel documentation, userspace-api/landlock (ABI 1 to 7); include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import functools
import os
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from ..spec import IsolationSpec, parse_endpoint
from . import calls

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2
_RULE_PATH, _RULE_PORT = 1, 2
_CREATE_VERSION = 1

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
ABI_TCP, ABI_SCOPES = 4, 6


@functools.cache
def abi() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return calls.syscall(calls.SYS_LANDLOCK_CREATE, 0, 0, _CREATE_VERSION, what="landlock_create_ruleset")
    except OSError:
        return 0


def handled_fs(version: int) -> int:
    """All file access rights that this ABI knows; what is handled and not granted is refused."""
    rights = (1 << 13) - 1
    if version >= 2:
        rights |= _REFER
    if version >= 3:
        rights |= _TRUNCATE
    if version >= 5:
        rights |= _IOCTL_DEV
    return rights


def without(path: Path, hidden: Iterable[Path]) -> list[Path]:
    """The largest existing paths that together are ``path`` minus ``hidden``.

    Landlock only grants, beneath whole directories; to leave something out, its siblings are granted one by one.
    """
    inside = [h for h in hidden if h == path or path in h.parents]
    if not inside:
        return [path]
    if path in inside:
        return []
    try:
        children = sorted(path.iterdir())
    except OSError:
        return []
    return [kept for child in children for kept in without(child, inside)]


def prepare(spec: IsolationSpec) -> None:
    """Work out, in the template, the paths that all its sessions are granted."""
    _granted(spec.readable_paths, spec.writable_paths[1:], spec.hidden_paths)


@functools.lru_cache(maxsize=32)
def _granted(
    readable: tuple[Path, ...], writable: tuple[Path, ...], hidden: tuple[Path, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Readable and writable paths with the hidden ones taken out, as they are when the first session asks."""
    away = [Path(os.path.realpath(p)) for p in hidden]
    lists = (*readable, Path("/proc"), Path("/sys/devices/system")), writable
    first, second = (
        dict.fromkeys(str(kept) for path in paths for kept in without(Path(os.path.realpath(path)), away))
        for paths in lists
    )
    return tuple(first), tuple(second)


def restrict(spec: IsolationSpec) -> None:
    """Confine this process: files by the spec's lists, TCP by its network mode, signals and abstract sockets to its own kind.

    Raises: OSError when the kernel refuses; the caller must not go on.
    """
    version = abi()
    handled = handled_fs(version)
    network = _BIND_TCP | _CONNECT_TCP if spec.network != "host" and version >= ABI_TCP else 0
    if spec.network == "loopback":
        network &= ~_BIND_TCP  # servers inside the session stay possible
    scopes = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if version >= ABI_SCOPES else 0
    attributes = struct.pack("QQQ", handled, network, scopes)
    size = 24 if version >= ABI_SCOPES else 16 if version >= ABI_TCP else 8
    ruleset = calls.syscall(calls.SYS_LANDLOCK_CREATE, attributes, size, 0, what="landlock_create_ruleset")
    try:
        readable, writable = _granted(spec.readable_paths, spec.writable_paths[1:], spec.hidden_paths)
        for path in readable:
            _allow_path(ruleset, path, _READ)
        for path in (*writable, os.path.realpath(spec.session_dir)):
            _allow_path(ruleset, path, handled & ~_IOCTL_DEV)
        for path in _DEVICES:
            _allow_path(ruleset, path, handled & (_READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV))
        if spec.network == "loopback" and network:
            for endpoint in spec.endpoints:
                rule = struct.pack("QQ", _CONNECT_TCP, parse_endpoint(endpoint)[1])
                calls.syscall(calls.SYS_LANDLOCK_ADD, ruleset, _RULE_PORT, rule, 0, what="landlock_add_rule port")
        calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
        calls.syscall(calls.SYS_LANDLOCK_RESTRICT, ruleset, 0, what="landlock_restrict_self")
    finally:
        os.close(ruleset)


def restrict_abstract_sockets() -> None:
    """Keep this process from abstract unix sockets outside, which a mount namespace does not hide. Does nothing before ABI 6."""
    if abi() < ABI_SCOPES:
        return
    attributes = struct.pack("QQQ", 0, 0, _SCOPE_ABSTRACT_UNIX)
    ruleset = calls.syscall(calls.SYS_LANDLOCK_CREATE, attributes, 24, 0, what="landlock_create_ruleset")
    try:
        calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
        calls.syscall(calls.SYS_LANDLOCK_RESTRICT, ruleset, 0, what="landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, or not reachable for this user: nothing to grant
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _ON_FILES
        rule = struct.pack("=Qi", rights, fd)
        calls.syscall(calls.SYS_LANDLOCK_ADD, ruleset, _RULE_PATH, rule, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(fd)
