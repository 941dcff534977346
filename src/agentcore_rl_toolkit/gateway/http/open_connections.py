"""The open connections of a server: how many there may be, and which of them end."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

from ..._servers.host_check import HostCheck
from ..._servers.open_files import MAX_OPEN_FILES
from ..config import Limits
from .connection import AgentConnection

STALLED_S = 60.0  # an agent that reads nothing of its reply for this long is gone


def most_connections() -> int:
    """Three quarters of the files this process may open: the others are for what the requests need."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft) * 3 // 4


class OpenConnections:
    """See the module."""

    def __init__(self, limits: Limits, hosts: HostCheck) -> None:
        self.limits = limits
        self.hosts = hosts
        self.most = limits.connections or most_connections()
        self._open: set[AgentConnection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(list(self._open))

    def adopt(self, conn: AgentConnection) -> None:
        """Take a new connection in; one too many is answered 503."""
        if len(self._open) >= self.most:
            conn.refuse("the gateway has as many connections as it takes; try again", kind="overloaded", status=503)
        else:
            self._open.add(conn)

    def forget(self, conn: AgentConnection) -> None:
        self._open.discard(conn)

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
