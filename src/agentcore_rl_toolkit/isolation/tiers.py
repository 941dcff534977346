"""The isolation tiers: what each one stops, what it leaves open, and how a session process gets into it.

Contract with a launcher that forks sessions from a template (single-threaded, Linux or macOS)::

    tier = choose_tier("auto", network=spec.network)
    pid = tier.fork(spec)              # like os.fork(); in the parent a direct child to wait for, in the parent's numbering
    if pid == 0:
        try:
            ...                        # anything that needs the host's files: open the log, make the session's folders
            tier.confine_child(spec)   # returns confined; raises when it could not
            ...                        # the agent's code
        finally:
            os._exit(1)                # a child that could not be confined must never go on
    ...
    os.waitpid(pid, 0)
    tier.release(spec)                 # after the session ended

In the namespaces tier the child is pid 1 of its own pid namespace: ``os.getppid()`` is 0 there, killing it ends every process
it ever started, and SIGTERM reaches it only while it has a handler for it (as for pid 1 of any container). A child made with
plain ``os.fork()`` may call `confine_child` too; in that tier its old self then stays behind as a stand-in that passes signals
on and exits as the session does, so the launcher waits for the pid it knows.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

from ..errors import ConfigError, LocalRuntimeError
from .base import BOOT, Tier, TierName, TierReport, settle
from .engines import engine_unavailable, gvisor_unavailable
from .limits import limits_report, set_limits, wants_groups
from .linux import cgroups, landlock, namespaces, rootfs, seccomp
from .linux.calls import PR_SET_NO_NEW_PRIVS, drop_capabilities, prctl
from .spec import NETWORKS, IsolationSpec, Network

__all__ = ["TIERS", "Tier", "TierReport", "available_tiers", "choose_tier"]
log = logging.getLogger(__name__)


class NamespaceTier(Tier):
    """Own pid, mount, IPC, UTS and (on request) network namespace, no capabilities; by system calls."""

    name: TierName = "namespaces"

    def describe(self) -> TierReport:
        return TierReport(
            name=self.name,
            unavailable=_namespaces_unavailable(),
            stops=(
                "reading or writing any file outside the session's own lists",
                "seeing, signalling or tracing processes of the host or of other sessions, and their environments",
                "leaving processes behind: killing the session kills all it started",
                "filling the host's /tmp or /dev/shm",
                "shared memory, semaphores and message queues of others",
                "regaining privileges: no capabilities, no setuid",
                "with network 'loopback' or 'none': any connection but to the named endpoints",
            ),
            leaves_open=(
                "the kernel is shared: a kernel vulnerability is not stopped (use gvisor, or AgentCore itself, for hostile code)",
                "disk space of the session's own directory is bounded per file, not in sum",
                "with network 'host': every service that this machine can reach",
            ),
            networks=self.networks,
            limits=limits_report({"tmp_bytes": "tmpfs"}),
        )

    @property
    def networks(self) -> tuple[Network, ...]:
        return NETWORKS

    def fork(self, spec: IsolationSpec) -> int:
        # Found once here rather than once per child.
        if wants_groups(spec):
            cgroups.detect()
        rootfs.prepare(spec)
        return namespaces.fork(spec)

    def fork_into(self, pid: int, spec: IsolationSpec) -> int:
        """The child joins the namespaces of ``pid``; ``spec`` gives limits, environment and folder."""
        # The control group is joined from outside: once inside, it is out of sight.
        child = namespaces.fork_into(pid, lambda: set_limits(spec))
        if child == 0:
            drop_capabilities()
            settle(spec)
        return child

    def confine_child(self, spec: IsolationSpec) -> None:
        self.refuse(spec.network)
        try:
            set_limits(spec)
            namespaces.enter(spec)
            if spec.network == "loopback" and spec.endpoints:
                from .relay import hand_over  # asyncio is not for processes that never need it

                hand_over(spec)
            rootfs.build(spec)
            if spec.network == "host":
                landlock.restrict_abstract_sockets()
            drop_capabilities()
            settle(spec)
        except OSError as e:
            raise LocalRuntimeError(f"could not confine the session in namespaces: {e}") from e

    def confine_loader(self, spec: IsolationSpec) -> bool:
        try:
            namespaces.enter_as_loader(spec)
            if spec.network == "loopback" and spec.endpoints:
                from .relay import hand_over

                hand_over(spec)
            rootfs.build(spec, loader=True)
            prctl(PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
            if spec.network == "host":
                landlock.restrict_abstract_sockets()
            os.chdir(spec.cwd or spec.session_dir)
        except OSError as e:
            raise LocalRuntimeError(f"could not confine the agent's template in namespaces: {e}") from e
        return True


class LandlockTier(Tier):
    """File, TCP and signal rules that a process puts on itself; no privilege needed, Linux 5.13 or newer."""

    name: TierName = "landlock"

    def describe(self) -> TierReport:
        version = landlock.abi()
        stops = [
            "reading or writing any file outside the session's own lists",
            "tracing other processes, reading their environments",
        ]
        leaves = [
            "other processes are visible by name and command line",
            "(not open, but missing: POSIX shared memory and named semaphores, as used by multiprocessing locks)",
            "unix sockets of the same user can be connected to where their path is known",
            "processes that leave their group outlive the session unless the launcher adopts and kills them",
            "mode, times, group and extended attributes of this user's files, wherever they are; not what is in them",
            "that files exist: their names' attributes, and locks on those that can be read",
            "priority, scheduling and CPU affinity of this user's other processes",
            "System V shared memory, semaphores and message queues, and the kernel's keyrings, of this user",
            "the kernel is shared: a kernel vulnerability is not stopped",
            "disk space is bounded per file, not in sum",
        ]
        (stops if version >= landlock.ABI_SCOPES else leaves).append("signals to other sessions' processes")
        (stops if seccomp.available() else leaves).append("resource limits of other processes (prlimit)")
        if version >= landlock.ABI_TCP:
            stops.append("with network 'loopback': TCP connections to other ports than the endpoints'")
            leaves.append("with network 'loopback': UDP, and the endpoints' port numbers on other hosts")
        return TierReport(
            name=self.name,
            unavailable=None if version else "this kernel has no Landlock (Linux 5.13 or newer, enabled at boot)",
            stops=tuple(stops),
            leaves_open=tuple(leaves),
            networks=self.networks,
            limits=limits_report(),
        )

    @property
    def networks(self) -> tuple[Network, ...]:
        return ("host", "loopback") if landlock.abi() >= landlock.ABI_TCP else ("host",)

    def fork(self, spec: IsolationSpec) -> int:
        if wants_groups(spec):
            cgroups.detect()
        landlock.prepare(spec)
        return os.fork()

    def confine_loader(self, spec: IsolationSpec) -> bool:
        try:
            landlock.restrict(spec)
            seccomp.restrict()
            drop_capabilities()
        except OSError as e:
            raise LocalRuntimeError(f"could not confine the agent's template with Landlock: {e}") from e
        return True

    def confine_child(self, spec: IsolationSpec) -> None:
        self.refuse(spec.network)
        try:
            set_limits(spec)
            settle(spec)
            landlock.restrict(spec)
            seccomp.restrict()
            drop_capabilities()
        except OSError as e:
            raise LocalRuntimeError(f"could not confine the session with Landlock: {e}") from e


class ProcessTier(Tier):
    """A plain process with resource limits. Everywhere; for code that is trusted as the user's own."""

    name: TierName = "process"

    def describe(self) -> TierReport:
        return TierReport(
            name=self.name,
            unavailable=None,
            stops=("using more than the limits",),
            leaves_open=(
                "every file of this user, other sessions' included",
                "every process of this user: environment, signals",
                "the network",
            ),
            networks=self.networks,
            limits=limits_report(),
        )

    def confine_child(self, spec: IsolationSpec) -> None:
        self.refuse(spec.network)
        log.warning(
            "session %s runs as a plain process: nothing keeps it from other files and processes of this user",
            spec.name,
        )
        try:
            set_limits(spec)
            settle(spec)
        except OSError as e:
            raise LocalRuntimeError(f"could not set the limits of the session: {e}") from e


class DockerTier(Tier):
    """One container per session, started by the runtime through a container engine (`runtime.containers`)."""

    name: TierName = "docker"

    def describe(self) -> TierReport:
        return TierReport(
            name=self.name,
            unavailable=engine_unavailable(),
            stops=(
                "reading or writing the host's files, but for programs and the agent's own, which are read-only",
                "seeing, tracing or signalling other sessions' processes",
                "connecting to services that listen on this machine's loopback only, but for the named endpoints",
                "with network 'loopback' or 'none': any other connection",
                "regaining privileges: no capabilities, no setuid",
            ),
            leaves_open=(
                "the kernel is shared: a kernel vulnerability is not stopped",
                "with network 'host': every service that the engine's bridge network can reach, other sessions' included",
                "what is written to the container is measured every two seconds, not bounded at once",
            ),
            networks=self.networks,
            limits=dict.fromkeys(
                ("memory_bytes", "cpus", "processes", "tmp_bytes", "open_files", "file_bytes"), "container engine"
            )
            | {"disk_bytes": "measured"},
        )

    @property
    def networks(self) -> tuple[Network, ...]:
        return NETWORKS

    def confine_child(self, spec: IsolationSpec) -> None:
        raise self._not_a_child()

    def fork(self, spec: IsolationSpec) -> int:
        raise self._not_a_child()

    def _not_a_child(self) -> ConfigError:
        return ConfigError(
            f"sessions of isolation tier {self.name!r} are containers, which the runtime starts: "
            f"agentcore-rl runtime serve --isolation {self.name}"
        )


class GvisorTier(DockerTier):
    """The same containers behind gVisor: a kernel of its own for each, in user space."""

    name: TierName = "gvisor"

    def describe(self) -> TierReport:
        report = super().describe()
        return replace(
            report,
            unavailable=gvisor_unavailable(),
            stops=("direct system calls to the host's kernel", *report.stops),
            leaves_open=("the number of processes, but for the memory they take", *report.leaves_open[1:]),
            limits={k: v for k, v in report.limits.items() if k != "processes"}
            | dict.fromkeys(("tmp_bytes", "open_files", "file_bytes"), "gVisor"),
        )

    @property
    def networks(self) -> tuple[Network, ...]:
        return ("host",)


TIERS: dict[str, Tier] = {
    t.name: t for t in (NamespaceTier(), LandlockTier(), ProcessTier(), DockerTier(), GvisorTier())
}
_AUTO = ("namespaces", "landlock", "process")


@functools.cache
def _namespaces_unavailable() -> str | None:
    """Why the tier cannot be used, found out by using it once in a throw-away process."""
    if sys.platform != "linux":
        return "namespaces exist on Linux only"
    if loader_unavailable("namespaces") is None:  # which takes them twice
        return None
    with tempfile.TemporaryDirectory(prefix="agentcore-rl-probe-") as directory:
        return _probe("probe", directory)


def _probe(what: str, directory: str) -> str | None:
    command = [sys.executable, "-I", BOOT, "isolation.run", what, directory]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"the probe did not run: {e}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the probe ended with status {done.returncode}"


@functools.cache
def loader_unavailable(name: str) -> str | None:
    """Why a template cannot be confined under this tier here, found out by trying; None when it can."""
    if sys.platform != "linux":
        return "on Linux only"
    if name != "namespaces":
        return None if name == "landlock" else f"isolation {name!r} confines nothing"
    with tempfile.TemporaryDirectory(prefix="agentcore-rl-probe-") as directory:
        return _probe("probe-loader", directory)


def available_tiers() -> list[TierReport]:
    """Every tier with what it does on this machine, strongest first."""
    return [tier.describe() for tier in TIERS.values()]


def choose_tier(name: str = "auto", *, network: Network = "host") -> Tier:
    """The tier of that name, or for "auto" the strongest one here that holds ``network``.

    For launchers at their start: control groups that a killed predecessor left behind are removed on the way.
    Raises: ConfigError when a named tier is unknown, unavailable, or cannot hold the network mode.
    """
    cgroups.sweep(wait_s=cgroups.DYING_S)
    if name != "auto":
        if name not in TIERS:
            raise ConfigError(f"isolation must be auto, {', '.join(TIERS)}; got {name!r}")
        tier = TIERS[name]
        report = tier.describe()
        if report.unavailable is not None:
            raise ConfigError(f"isolation tier {name!r} is not available here: {report.unavailable}")
        tier.refuse(network)
        return tier
    why: list[str] = []
    for candidate in _AUTO:
        report = TIERS[candidate].describe()
        if report.available and network in report.networks:
            return TIERS[candidate]
        why.append(f"{candidate}: {report.unavailable or 'holds network ' + ', '.join(report.networks)}")
    raise ConfigError(f"no isolation tier here can hold network={network!r} ({'; '.join(why)})")
