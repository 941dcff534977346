"""The isolation tiers of the local runtime, and the Bubblewrap sandbox of the first one.

``process``: one sandbox per agent version. Its sessions are forks of the template inside it. ``none``: no sandbox.
``container``: a container per session, in Docker or Podman. The first one protects this user's files from a policy's mistakes;
code that is not trusted belongs into the last one, or on AgentCore.

The system's folders, the interpreter, this package, the agent's project and the paths of ``--readable`` are read-only inside;
the folders of the sessions and of ``--writable``, and the store, are writable. `Cover` hides answers and keys in all of them.
Network and users are as outside. With a view and Linux 6.12, a session and each command can signal only their own processes.

``/proc`` is the real one, whole: only then can a Bubblewrap inside (an agent that runs its tools in sandboxes) make a
sandbox, as root and as an ordinary user. The sandbox is a user namespace, from which the kernel lets no process look into one
outside. Root's namespace has all users of this machine.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..errors import AgentLoadError, ConfigError
from . import user_namespace, view
from .project import Project

TierName = Literal["process", "none", "container"]
INSTALL = "on Debian and Ubuntu: apt-get install bubblewrap"
BWRAP_S = 30.0
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store", "/sys")
# Root could unmount a cover with it. A sandbox inside needs a user namespace then.
CAPABILITY = "CAP_SYS_ADMIN"
_ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]))"


def choose_tier(wanted: TierName | Literal["auto"] = "auto") -> tuple[TierName, str | None]:
    """Choose the tier. Return why it is weaker than the default, if so. ``auto``: process, or none without Bubblewrap. Blocks.

    Raises: ConfigError on a named tier that is not available.
    """
    why = no_sandbox() if wanted in ("auto", "process") else None
    if why is None:
        return ("process" if wanted == "auto" else wanted), None
    if wanted == "auto":
        return "none", why
    raise ConfigError(f"isolation {wanted!r} is not available here: {why}")


@functools.cache
def no_sandbox() -> str | None:
    """Return the reason why Bubblewrap makes no sandbox here, or None if it makes one."""
    if not sys.platform.startswith("linux"):
        return "Bubblewrap exists on Linux only"
    if shutil.which("bwrap") is None:
        return f"bwrap is not installed; {INSTALL}"
    try:
        done = subprocess.run([*command(), "true"], capture_output=True, text=True, timeout=BWRAP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"bwrap: {e}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"bwrap ended with status {done.returncode}"


def command(
    readable: Sequence[Path] = (), writable: Sequence[Path] = (), covers: Mapping[str, str] = {}, tmp: str = ""
) -> list[str]:
    """Return the start of a command that runs the rest in the sandbox. Paths that do not exist are left out.

    ``covers``: the mounts of a `Cover`. ``tmp``: the folder that is /tmp in the sandbox.
    """
    words = ["bwrap"]
    if os.geteuid() == 0:
        words = [sys.executable, "-IS", str(Path(user_namespace.__file__)), "--cap-drop", CAPABILITY]
    words += ["--die-with-parent", "--perms", "1777", "--tmpfs", view.TMP]
    for name in SYSTEM:
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    words += ["--dev", "/dev", "--bind", "/proc", "/proc", "--dir", "/run", "--dir", view.SCRATCH]
    resolver = os.path.realpath("/etc/resolv.conf")  # it may lie in /run
    binds = {path: ("--ro-bind", path) for path in _named((Path(resolver), *readable))}
    binds |= {path: ("--dev-bind" if path.startswith("/dev/") else "--bind", path) for path in _named(writable)}
    binds |= {path: ("--ro-bind-try", source) for path, source in covers.items()}  # files come and go meanwhile
    if not any(f"{path}/".startswith("/var/tmp/") for path in binds):  # a mount in a link would be in /tmp
        words += ["--symlink", "../tmp", "/var/tmp"]
    if tmp and view.TMP not in binds:
        words += ["--bind", tmp, view.TMP, "--chmod", "1777", view.TMP, "--ro-bind", tmp, view.BARE_TMP]
    bound = {name: ("--ro-bind", name) for name in SYSTEM}
    for path in sorted(
        binds, key=lambda p: p.count("/")
    ):  # an inner one over the outer one, if that shows something else
        kind, source = binds[path]
        outer = next((p for p in map(str, Path(path).parents) if p in bound), "")
        if outer and os.path.islink(path):  # the outer folder has the link, and its target is shown separately
            continue
        above, behind = bound.get(outer, ("", path))
        if behind != outer or source != path or (above.startswith("--ro") and not kind.startswith("--ro")):
            bound[path] = kind, source
            words += [kind, source, path]
    return [*words, "--remount-ro", "/"]


def _named(paths: Iterable[Path]) -> list[str]:
    found = dict.fromkeys(name for path in paths for name in (str(path), os.path.realpath(path)))
    return [name for name in found if os.path.exists(name)]


def project_of(script: Path) -> Path:
    """Find the visible folder of an agent's project: its git checkout, the folder of its pyproject.toml, or its own folder.

    The home folder and what lies around it are no project: of an agent in there the file alone is shown.
    """
    above = [folder for folder in script.parents if not Path.home().is_relative_to(folder)]
    for mark in (".git", "pyproject.toml"):
        for folder in above:
            if (folder / mark).exists():
                return folder
    return Project.of(script).folder if script.parent in above else script


def interpreter_paths(python: Path) -> list[Path]:
    """Find the paths of an interpreter and its modules: prefixes, import path, and the links that lead to it. Blocks.

    Raises: AgentLoadError when it cannot be run.
    """
    if python == Path(sys.executable):
        found = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    else:
        try:
            done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
            found = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise AgentLoadError(f"cannot run {python}: {e}") from e
    shared = ("/", "/tmp", "/var/tmp", str(Path.home()), str(Path.cwd()))
    paths = [Path(p) for p in found if os.path.isabs(p) and p not in shared]
    link = python
    while link.is_symlink():
        link = link.parent / link.readlink()
        paths.append(link)
    return list(dict.fromkeys(paths))
