"""The argument list by which bubblewrap gives a command the view of the namespaces tier. A pure function of the spec."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .spec import IsolationSpec


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
