"""Finds descriptors that the forks of a process must not share: two sessions would read each other's answers from them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys

_STATELESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def shared_by_forks(control: int) -> list[str]:
    """Describe the open descriptors of this process. Forks share the data of a connection, and the position in a file.

    Harmless are the standard streams, ``control``, files that are only appended to, devices without state, and the pipe to
    the resource tracker of `multiprocessing`, which serves forks.
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    found: list[str] = []
    for fd in sorted({*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, control, getattr(tracker, "_fd", None)}):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            flags, mode = fcntl.fcntl(fd, fcntl.F_GETFL), os.fstat(fd).st_mode
            name = os.readlink(f"/dev/fd/{fd}") if sys.platform == "linux" else f"descriptor {fd}"
            only_appends = flags & os.O_APPEND and flags & os.O_ACCMODE == os.O_WRONLY
            if stat.S_ISSOCK(mode):
                found.append(_socket(fd))
            elif stat.S_ISFIFO(mode):
                found.append("a pipe")
            elif name not in _STATELESS and not only_appends:
                found.append("an event loop" if name == "anon_inode:[eventpoll]" else name)
    return list(dict.fromkeys(found))


def _socket(fd: int) -> str:
    with socket.socket(fileno=os.dup(fd)) as found:
        with contextlib.suppress(OSError):
            peer = found.getpeername()
            return f"a connection to {_text(peer)}" if peer else "a socket pair"
        return f"a socket at {_text(found.getsockname())}"


def _text(address: object) -> str:
    if isinstance(address, tuple) and isinstance(address[0], str):
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
    text = os.fsdecode(address) if isinstance(address, bytes) else str(address)
    return text.replace("\0", "@")
