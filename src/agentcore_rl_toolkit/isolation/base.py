"""What every tier is made of: the interface, the report, and the limits that all of them set. The contract is in `tiers`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .limits import wants_groups
from .linux import cgroups
from .spec import IsolationSpec, Network

TierName = Literal["namespaces", "landlock", "process", "docker", "gvisor"]
BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot.py")


@dataclass(frozen=True, kw_only=True)
class TierReport:
    """What a tier does on this machine. ``unavailable`` says why it cannot be used, None when it can.

    ``limits`` maps each bound of `Limits` that is enforced to what enforces it: "cgroup v1" and "cgroup v2" hold for the session
    as a whole, "rlimit" per process, "tmpfs" for the private /tmp.
    """

    name: TierName
    unavailable: str | None
    stops: tuple[str, ...]
    leaves_open: tuple[str, ...]
    networks: tuple[Network, ...]
    limits: dict[str, str]

    @property
    def available(self) -> bool:
        return self.unavailable is None


class Tier(ABC):
    """One isolation mechanism. Instances hold no state and may be shared."""

    name: TierName

    @abstractmethod
    def describe(self) -> TierReport:
        """What it stops here and what it does not."""

    @abstractmethod
    def confine_child(self, spec: IsolationSpec) -> None:
        """Confine this process for good. Raises: LocalRuntimeError; the process must then end."""

    def fork(self, spec: IsolationSpec) -> int:
        """Like ``os.fork()``, with whatever has to happen before the child exists. The child is not confined yet."""
        return os.fork()

    def confine_loader(self, spec: IsolationSpec) -> bool:
        """Confine this process, which is to run an agent's module code and then to fork its sessions. Returns: whether it did.

        ``spec`` is as a session's; its ``writable`` has to hold what sessions are made from. The process may go on in a child.
        Raises: LocalRuntimeError.
        """
        return False

    def fork_into(self, pid: int, spec: IsolationSpec) -> int:
        """Like ``os.fork()``, the child being confined beside the running session ``pid`` (a command run in a session)."""
        child = self.fork(spec)
        if child == 0:
            self.confine_child(spec)
        return child

    def release(self, spec: IsolationSpec) -> None:
        """Give back what the ended session held outside itself (its control group)."""
        if wants_groups(spec):
            cgroups.remove(spec.name)

    @property
    def networks(self) -> tuple[Network, ...]:
        """The network modes it can hold here."""
        return ("host",)

    def refuse(self, network: Network) -> None:
        """Raises: ConfigError when it cannot hold the mode. A tier never silently does less than was asked."""
        if network not in self.networks:
            held = ", ".join(self.networks)
            raise ConfigError(f"isolation tier {self.name!r} cannot hold network={network!r} here, only {held}")


def settle(spec: IsolationSpec) -> None:
    if spec.env is not None:
        os.environ.clear()
        os.environ.update(spec.env)
    os.chdir(spec.cwd or spec.session_dir)
