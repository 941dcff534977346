"""Argument lists for programs that confine a command: bubblewrap, Docker or Podman, gVisor. Pure functions and detection."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from .spec import IsolationSpec

_PROBE_TIMEOUT_S = 20.0


def bubblewrap_argv(argv: Sequence[str], spec: IsolationSpec, *, program: str = "bwrap") -> list[str]:
    """The same view as the namespaces tier gives, built by bubblewrap.

    Memory, CPU and process limits are not bubblewrap's; the caller sets them on the process that runs it.
    """
    out = [program, "--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    out += ["--hostname", spec.hostname, "--cap-drop", "ALL", "--new-session"]
    if spec.die_with_parent:
        out.append("--die-with-parent")
    if spec.network != "host":
        out.append("--unshare-net")
    for directory in ("/tmp", "/dev/shm"):
        if directory == "/dev/shm":
            out += ["--proc", "/proc", "--dev", "/dev"]
        if spec.limits.tmp_bytes is not None:
            out += ["--size", str(spec.limits.tmp_bytes)]
        out += ["--tmpfs", directory]
    binds: dict[str, list[str]] = {}
    links: list[str] = []
    for kind, paths in (("--ro-bind", spec.readable_paths), ("--bind", spec.writable_paths)):
        for path in paths:
            real = os.path.realpath(path)
            if os.path.exists(real):
                binds[real] = [kind, real, real]
            if path.is_symlink():
                links += ["--symlink", os.readlink(path), str(path)]
    covers: list[str] = []
    for hidden in spec.hidden_paths:
        real = os.path.realpath(hidden)
        if any(str(above) in binds for above in (Path(real), *Path(real).parents)) and os.path.exists(real):
            binds[real] = ["--tmpfs", real] if os.path.isdir(real) else ["--ro-bind", "/dev/null", real]
            covers += ["--remount-ro", real] if os.path.isdir(real) else []
    for real in sorted(binds, key=lambda p: p.count("/")):  # the more specific path is mounted last and wins
        out += binds[real]
    out += links + covers
    for name in ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"):
        if os.path.exists(name):
            out += ["--ro-bind", name, name]
    return [*out, "--chdir", str(spec.cwd or spec.session_dir), "--", *argv]


def docker_argv(argv: Sequence[str], spec: IsolationSpec, *, program: str | None = None) -> list[str]:
    """``docker run`` (or ``podman run``) of ``spec.image``; the environment is passed by name and taken from the caller's.

    Raises: ConfigError without an image, or for a network mode that a container engine cannot hold.
    """
    if spec.image is None:
        raise ConfigError("isolation tier 'docker' needs an image")
    if spec.network == "loopback":
        raise ConfigError("isolation tier 'docker' holds network 'host' or 'none'")
    limits = spec.limits
    out = [program or _engine() or "docker", "run", "--rm", "--init", "--read-only", "--cap-drop=ALL"]
    out += ["--security-opt=no-new-privileges", f"--network={spec.network}", f"--hostname={spec.hostname}"]
    if spec.network == "host":
        out.remove(f"--hostname={spec.hostname}")  # engines refuse it together with the host's network
    out.append("--tmpfs=/tmp" + (f":size={limits.tmp_bytes}" if limits.tmp_bytes is not None else ""))
    if limits.memory_bytes is not None:
        out += [f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"]
    if limits.cpus is not None:
        out.append(f"--cpus={limits.cpus}")
    if limits.processes is not None:
        out.append(f"--pids-limit={limits.processes}")
    if limits.open_files is not None:
        out.append(f"--ulimit=nofile={limits.open_files}")
    if limits.file_bytes is not None:
        out.append(f"--ulimit=fsize={limits.file_bytes}")
    for path in spec.read_only:
        out.append(f"--volume={path}:{path}:ro")
    for path in spec.writable_paths:
        out.append(f"--volume={path}:{path}")
    for name in sorted(spec.env or {}):
        out.append(f"--env={name}")
    return [*out, f"--workdir={spec.cwd or spec.session_dir}", spec.image, *argv]


def gvisor_argv(argv: Sequence[str], spec: IsolationSpec, *, program: str = "runsc") -> list[str]:
    """``runsc do``: the host's files read-only behind gVisor's kernel. Raises: ConfigError for a network other than 'none'."""
    if spec.network != "none":
        raise ConfigError("isolation tier 'gvisor' holds network 'none' only")
    out = [program]
    if os.geteuid() != 0:
        out.append("--rootless")
    out += ["--network=none", "do", f"--cwd={spec.cwd or spec.session_dir}"]
    return [*out, "--", *argv]


@functools.cache
def docker_unavailable() -> str | None:
    """Why no container engine can be used; None when one answers."""
    program = _engine()
    if program is None:
        return "neither docker nor podman is on PATH"
    return _fails([program, "info", "--format", "{{.ID}}" if program.endswith("docker") else "{{.Host.OS}}"])


@functools.cache
def gvisor_unavailable() -> str | None:
    """Why ``runsc`` cannot be used; None when it runs a command."""
    program = shutil.which("runsc")
    if program is None:
        return "runsc is not on PATH"
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    return _fails([program, *rootless, "--network=none", "do", "true"])


def _engine() -> str | None:
    return shutil.which("docker") or shutil.which("podman")


def _fails(argv: list[str]) -> str | None:
    name = Path(argv[0]).name
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{name}: {e}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"{name}: {lines[-1]}" if lines else f"{name} ended with status {done.returncode}"
