"""Which process is at the other end, and whose it is, as the kernel says. Standard library only: agents' processes use it too."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

from .procfs import parent, pid_namespace

T = TypeVar("T")
OUTSIDE = 0  # the id of a process that is in no pid namespace of ours


def peer_pid(sock: Any) -> int | None:
    """The process that connected, or was connected to; None where the system does not tell.

    ``sock``: anything with a ``fileno``, event loops' socket look-alikes included. Source: unix(7), SO_PEERCRED.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX, fileno=os.dup(sock.fileno())) as same:
        return int(struct.unpack("3i", same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def owner_of(pid: int, firsts: Mapping[int, T]) -> T | None:
    """To whom a process of this machine belongs. ``firsts``: the first processes of those that may own it.

    It is below one of them, or alone with one of them in a pid namespace: a command beside a session, and what an engine starts
    in a container, is not below its first process.
    """
    own, above = os.getpid(), pid
    while above > 1 and above != own:
        if above in firsts:
            return firsts[above]
        above = parent(above)
    space = pid_namespace(pid)
    if space is None or space == pid_namespace(own):
        return None
    here = {id(owner): owner for first, owner in firsts.items() if pid_namespace(first) == space}
    return here.popitem()[1] if len(here) == 1 else None
