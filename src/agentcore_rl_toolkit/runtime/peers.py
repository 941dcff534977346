"""Which process is at the other end of a unix socket, as the kernel says. Standard library only: agents' processes use it too."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

OUTSIDE = 0  # the id of a process that is in no pid namespace of ours


def peer_pid(sock: Any) -> int | None:
    """The process that connected, or was connected to; None where the system does not tell.

    ``sock``: anything with a ``fileno``, event loops' socket look-alikes included. Source: unix(7), SO_PEERCRED.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX, fileno=os.dup(sock.fileno())) as same:
        return int(struct.unpack("3i", same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
