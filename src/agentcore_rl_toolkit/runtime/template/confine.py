"""The launcher's side of the isolation tiers: one tier per template, one spec per session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Confinement:
    """Forks and confines children as the runtime's options say; without a tier it is a plain fork.

    ``settings``: ``tier`` and the entries of `IsolationSpec` that all sessions of the agent share.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._tier: Any = None
        self._spec_type: Any = None
        self._common: dict[str, Any] = {}
        self.groups: list[Path] = []  # of a confined loader: where its sessions' control groups are
        name = settings.get("tier")
        if name is None:
            return
        from ...isolation.spec import IsolationSpec, Limits
        from ...isolation.tiers import TIERS

        self._tier, self._spec_type = TIERS[name], IsolationSpec
        self._prefix = settings.get("name_prefix", "")
        self._common = {
            "read_only": tuple(Path(p) for p in settings.get("read_only", ())),
            "writable": tuple(Path(p) for p in settings.get("writable", ())),
            "hidden": tuple(Path(p) for p in settings.get("hidden", ())),
            "limits": Limits(**settings.get("limits", {})),
            "network": settings.get("network", "host"),
            "endpoints": tuple(settings.get("endpoints", ())),
            "relay": Path(settings["relay"]) if settings.get("relay") else None,
        }

    def confine_loader(self, settings: dict[str, Any]) -> bool:
        """Confine this process, before it runs the agent's module code. Returns: whether it is confined.

        ``settings``: ``home`` and, beside what sessions see, the ``writable`` folders that sessions are made in and the
        ``group`` that their control groups are made in.
        """
        if self._tier is None:
            return False
        from ...isolation.limits import wants_groups
        from ...isolation.linux import cgroups
        from ...isolation.spec import Limits

        writable = [*self._common["writable"], *(Path(p) for p in settings["writable"])]
        if self._common["relay"] is not None:
            writable.append(self._common["relay"])
        if wants_groups(self._spec(settings["home"])):
            self.groups = cgroups.narrow(settings["group"])
        common = {**self._common, "writable": (*writable, *self.groups), "limits": Limits()}
        spec = self._spec_type(session_dir=Path(settings["home"]), cwd=Path.cwd(), **common)
        return bool(self._tier.confine_loader(spec))

    @property
    def own_parent_check(self) -> bool:
        """The tier's fork takes care that the child dies with this process, and hides this process from it."""
        return self._tier is not None and self._tier.name == "namespaces"

    def _spec(self, directory: str) -> Any:
        path = Path(directory)
        return self._spec_type(session_dir=path, name=f"{self._prefix}{path.name}", **self._common)

    def fork(self, directory: str) -> int:
        """Fork a session: 0 in the child, else its process id as the parent knows it."""
        return os.fork() if self._tier is None else int(self._tier.fork(self._spec(directory)))

    def confine(self, directory: str) -> None:
        """In the child: give up what the tier takes away. Raises what the tier raises; the child must end then."""
        if self._tier is not None:
            self._tier.confine_child(self._spec(directory))

    def fork_beside(self, pid: int, directory: str) -> int:
        """Fork a process that shares the confinement of the running session ``pid``; it is confined on return."""
        return os.fork() if self._tier is None else int(self._tier.fork_into(pid, self._spec(directory)))

    def out_of_memory_kills(self, directory: str) -> int:
        """How many of the session's processes the kernel killed for its memory limit, as long as it is not released."""
        if self._tier is None or self._common["limits"].memory_bytes is None:
            return 0
        from ...isolation.linux.cgroups import out_of_memory_kills

        return out_of_memory_kills(self._spec(directory).name) or 0

    def release(self, directory: str) -> None:
        """After the session ended: remove what the tier held outside of it."""
        if self._tier is not None:
            self._tier.release(self._spec(directory))
