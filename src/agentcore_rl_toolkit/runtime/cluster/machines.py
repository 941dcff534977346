"""What a cluster is made of, as its router sees it, and who provides it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ConfigError
from ..agents.agent import Agent
from ..sessions.node import Node

DEFAULT_SESSION_BYTES = 64 * 2**20  # per session where no limit is set; a forked Strands session needs a fraction of it
USABLE_MEMORY = 0.8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that may run sessions. Units: cores, bytes; ``memory_bytes`` None: not known."""

    node_id: str
    host: str
    cpus: float
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class AgentAddress:
    """Where the node agent of a machine listens."""

    host: str
    port: int
    pid: int


class MachineProvider(Protocol):
    """A cluster that runs node agents. All of it may raise LocalRuntimeError."""

    async def open(self) -> None:
        """Connect. Raises: ConfigError, MissingExtraError when that cannot work."""
        ...

    async def machines(self) -> list[Machine]:
        """The machines that are alive now."""
        ...

    async def place(self, machine: Machine, token: str) -> AgentAddress:
        """Start a node agent there that knows the token."""
        ...

    async def remove(self, node_id: str) -> None:
        """End the node agent there, if there is one."""
        ...

    async def close(self) -> None: ...


class SessionCluster(Node, Protocol):
    """Where a router's sessions run. What the runtime asks of it besides starting sessions."""

    on_room: Callable[[int], None]  # so many more sessions may start at once

    @property
    def tier(self) -> str:
        """Isolation of its sessions."""
        ...

    async def start(self) -> None:
        """Connect. Raises: ConfigError, MissingExtraError when it cannot run sessions."""
        ...

    def admit(self, live: int) -> None:
        """Refuse a new session when there is no room. Raises: WireError 402."""
        ...

    async def forget_if_unused(self, agent: Agent) -> None: ...

    def describe(self) -> list[dict[str, Any]]:
        """The loaded agents."""
        ...

    def nodes(self) -> list[dict[str, Any]]: ...

    def drain(self, node_id: str) -> dict[str, Any] | None: ...


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How many sessions go where, and when a machine counts as gone. Units: seconds.

    ``sessions_per_node`` None: ``sessions_per_cpu`` times its cores, and no more than fit into its memory.
    ``silence_s``: a node agent that has not answered for so long is lost; it ends its sessions by itself after the same time.
    """

    sessions_per_node: int | None = None
    sessions_per_cpu: int = 50
    poll_s: float = 1.0
    join_timeout_s: float = 60.0
    silence_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("sessions_per_cpu", "poll_s", "join_timeout_s", "silence_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {getattr(self, name)!r}")
        if self.sessions_per_node is not None and self.sessions_per_node < 1:
            raise ConfigError(f"sessions_per_node must be at least 1, got {self.sessions_per_node!r}")

    def capacity(self, machine: Machine, session_bytes: int | None) -> int:
        """Sessions a machine takes at once, at least 1."""
        if self.sessions_per_node is not None:
            return self.sessions_per_node
        count = int(self.sessions_per_cpu * machine.cpus)
        if machine.memory_bytes is not None:
            count = min(count, int(USABLE_MEMORY * machine.memory_bytes / (session_bytes or DEFAULT_SESSION_BYTES)))
        return max(1, count)
