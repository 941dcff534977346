"""How many sessions a node takes, and when it counts as gone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ConfigError

DEFAULT_SESSION_BYTES = 64 * 2**20  # per session where no limit is set; a forked Strands session needs a fraction of it
USABLE_MEMORY = 0.8


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Settings of a cluster. Units: seconds.

    ``sessions_per_node`` None: ``sessions_per_cpu`` times its cores, and no more than fit into its memory.
    ``silence_s``: a node that has not answered for so long is lost.
    """

    sessions_per_node: int | None = None
    sessions_per_cpu: int = 50
    poll_s: float = 1.0
    join_timeout_s: float = 120.0
    silence_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("sessions_per_cpu", "poll_s", "join_timeout_s", "silence_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {getattr(self, name)!r}")
        if self.sessions_per_node is not None and self.sessions_per_node < 1:
            raise ConfigError(f"sessions_per_node must be at least 1, got {self.sessions_per_node!r}")

    def capacity(self, cpus: float, memory_bytes: float | None, session_bytes: int | None) -> int:
        """Sessions that a machine takes at once, at least 1. Units: cores, bytes; None: not known, no limit."""
        if self.sessions_per_node is not None:
            return self.sessions_per_node
        count = int(self.sessions_per_cpu * cpus)
        if memory_bytes is not None:
            count = min(count, int(USABLE_MEMORY * memory_bytes / (session_bytes or DEFAULT_SESSION_BYTES)))
        return max(1, count)
