"""The open connections of a server: how many, what they read with, and which of them end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from ..._servers.connection_room import ConnectionRoom, default_limit
from ..._servers.host_check import HostCheck
from ..config import Limits
from .connection import AgentConnection

STALLED_S = 60.0  # an agent that reads nothing of its reply for this long is gone


class OpenConnections:
    """See the module. ``receiving``: bytes of larger request bodies that are on their way in."""

    def __init__(self, limits: Limits, hosts: HostCheck) -> None:
        self.limits = limits
        self.hosts = hosts
        self.receiving = 0
        self.room = ConnectionRoom(limits.connections or default_limit())
        self._open: set[AgentConnection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(list(self._open))

    def adopt(self, conn: AgentConnection) -> None:
        """Take a new connection in, and close idle ones where there are too many."""
        conn.address = (conn.transport.get_extra_info("peername") or ("",))[0]
        self._open.add(conn)
        if self.room.opened(conn.address) or len(self._open) > self.room.limit:
            for each in self.room.make_room(conn, self._open, time.monotonic()):
                each.transport.abort()

    def forget(self, conn: AgentConnection) -> None:
        self._open.discard(conn)
        self.room.closed(conn.address)

    def sweep(self, now: float, counters: Counter[str]) -> None:
        """End connections on which nothing happens any more."""
        limits = self.limits
        for conn in self:
            head_since = conn.reader.head_since
            if conn.paused_since is not None and now - conn.paused_since > STALLED_S:
                counters["stalled_agents"] += 1
                conn.transport.abort()
            elif conn.busy:
                continue
            elif head_since is not None and now - head_since > limits.head_s:
                conn.refuse("the headers of the request did not come in time", kind="timeout", status=408)
            elif now - conn.active_s > limits.idle_connection_s:
                conn.transport.close()
