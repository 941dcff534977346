"""Limits that all tiers set: control groups where they are usable, and resource limits of the process itself under them."""

from __future__ import annotations

import logging
import os
import resource
import sys

from .linux import cgroups
from .spec import IsolationSpec, Limits

log = logging.getLogger(__name__)


def wants_groups(spec: IsolationSpec) -> bool:
    limits = spec.limits
    return limits.memory_bytes is not None or limits.processes is not None or limits.cpus is not None


def set_limits(spec: IsolationSpec) -> None:
    """Join the session's control group, and set what that does not hold as limits of this process."""
    held = cgroups.attach(spec.name, spec.limits) if wants_groups(spec) else frozenset()
    if spec.limits.cpus is not None and "cpu" not in held:
        log.warning(
            "no control group for CPU is usable here: session %s is not held to %s cores", spec.name, spec.limits.cpus
        )
    if spec.limits.processes is not None and "pids" not in held and _exempt():
        log.warning(
            "root is exempt from RLIMIT_NPROC and no control group is usable: processes of %s are not bounded",
            spec.name,
        )
    _set_rlimits(spec.limits, held)


def limits_report(extra: dict[str, str] | None = None) -> dict[str, str]:
    """What enforces each bound of `Limits` on this machine."""
    names = ["file_bytes", "open_files"]
    if sys.platform == "linux":
        names.append("memory_bytes")  # RLIMIT_DATA covers mmap since Linux 4.7; macOS ignores it for mmap
    out = dict.fromkeys(names if _exempt() else [*names, "processes"], "rlimit")
    where = cgroups.detect()
    for controller, name in (("memory", "memory_bytes"), ("pids", "processes"), ("cpu", "cpus")):
        if where is not None and controller in where.controllers:
            out[name] = f"cgroup v{where.version}"
    return {**out, **(extra or {})}


def _exempt() -> bool:
    """Whether RLIMIT_NPROC means nothing to this user."""
    return os.geteuid() == 0 and sys.platform == "linux"


def _set_rlimits(limits: Limits, held_by_groups: frozenset[str]) -> None:
    """Memory is bounded as RLIMIT_DATA, private writable memory: RLIMIT_AS would count address space that numerical libraries
    reserve and never touch. It holds per process, not per session. Core dumps are switched off."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, None if "memory" in held_by_groups else limits.memory_bytes),
        (resource.RLIMIT_NPROC, None if "pids" in held_by_groups else limits.processes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
    ):
        if value is not None:
            _, hard = resource.getrlimit(kind)
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))
