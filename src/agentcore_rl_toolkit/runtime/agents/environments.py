"""Python environments for deployed agents, built with uv from the dependency file next to the agent's file.

An environment is keyed by its dependency files and the interpreter. Agents with the same dependencies share one. At each deploy,
uv brings it up to date, which takes a fraction of a second if nothing has changed. Of two deploys at once, the second waits.
Modules are compiled to bytecode, which halves the start of an agent.

An agent that imports this toolkit gets the version that runs here, from a wheel written for it: under its name the package index
has another product. If a dependency file has a version or a source of it, this one is used.

Environments are never removed: uv links most of their files from its own cache. The folder may be deleted while no agent runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ..._installation import find_uv, run_tool, wheel_digest, write_wheel
from ...errors import LocalRuntimeError
from ...isolation.project import Project

BUILD_TIMEOUT_S, CHECK_TIMEOUT_S = 900, 60
# Lines that refer to files of this machine, or to other lists: then an environment belongs to one folder.
_LOCAL = re.compile(rb"^\s*-|\.\.?/|file:|\b(?:path|directory|editable|virtual)\s*=", re.MULTILINE)
# This toolkit as a requirement. The group is its version or source.
_TOOLKIT = re.compile(
    r"(?<![\w./-])agentcore[-_.]rl[-_.]toolkit(?:\[[^\]]*\])?[ \t]*((?:[=<>!~]=?|@)[^\"'#;\n]*)?", re.IGNORECASE
)


def fits_here(agent: Path) -> bool:
    """Return True if this environment has the packages that the agent's dependency file lists, or if there is no such file.

    Blocks. Raises: ConfigError without uv.
    """
    file = Project.of(agent).dependencies
    if file is None:
        return True
    options = ("--dry-run", "--offline", "--no-build", "--python", sys.executable, "-r", file.name)
    words = [find_uv(), "pip", "install", *options]
    try:
        done = subprocess.run(
            words, cwd=file.parent, timeout=CHECK_TIMEOUT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:  # another uv holds the environment's lock
        return False
    return "Would make no changes" in done.stderr


def build(script: Path, root: Path | None = None, *, toolkit: bool = False) -> Path:
    """Build an agent's environment below ``root`` (default: `cache_dir`), or bring it up to date. Return its interpreter. Blocks.

    It has the packages of uv.lock + pyproject.toml, pyproject.toml, or requirements.txt of the script's project. Without such a
    file it is this environment. ``toolkit``: the agent is to be served with this toolkit, although its files may not name it.

    Raises: LocalRuntimeError with uv's output when it cannot be built.
    """
    project = Project.of(script)
    folder, file = project.folder, project.dependencies
    if file is None:
        return Path(sys.executable)
    lock = folder / "uv.lock"
    files = [file, lock] if file.suffix == ".toml" and lock.is_file() else [file]
    toolkit = _wants_toolkit({folder, script.parent}, file, lock in files, toolkit)
    uv, home = find_uv(), (root or cache_dir()) / _key(folder, files, toolkit)
    python = home / "bin" / "python"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("a") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)  # the holder of the lock ends at uv's deadline
        if not python.exists():
            shutil.rmtree(home, ignore_errors=True)  # left by a failed attempt
            _run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], folder)
        wanted: list[str] = []
        if toolkit:
            made = next(home.glob("*.whl"), None) or write_wheel(home)
            wanted.append(f"agentcore-rl-toolkit @ {made.as_uri()}")
        if lock in files:
            options = ("--frozen", "--no-dev", "--no-install-project", "--inexact", "--compile-bytecode")
            env = {"VIRTUAL_ENV": str(home), "UV_PROJECT_ENVIRONMENT": str(home)}
            _run([uv, "sync", "--quiet", *options], folder, env)
        else:
            if wanted:
                (home / "toolkit.txt").write_text(f"{wanted[0]}\n")
                wanted += ["--override", str(home / "toolkit.txt")]
            wanted += ["--compile-bytecode", "-r", file.name]
        if wanted:
            _run([uv, "pip", "install", "--quiet", "--python", str(python), *wanted], folder)
    return python


def _wants_toolkit(folders: Iterable[Path], file: Path, locked: bool, served: bool) -> bool:
    """Return True if the agent needs this toolkit, and its dependency file sets neither version nor source of it.

    ``served``: it is to be served with this toolkit. A lock has all other packages that the agent needs.
    """
    text = file.read_text(errors="replace")
    given = _TOOLKIT.findall(text)
    if any(version.strip() for version in given) or re.search(r"agentcore_rl_toolkit-[^/\s]*\.whl", text):
        return False
    if locked:
        return served and not given
    imports = (b"agentcore_rl_toolkit" in path.read_bytes() for folder in folders for path in folder.glob("*.py"))
    return bool(given) or served or any(imports)


def _key(folder: Path, files: Iterable[Path], toolkit: bool) -> str:
    digest = hashlib.sha256(f"{sys.executable}\0{sys.version}\0{platform.platform()}".encode())
    for file in files:
        content = file.read_bytes()
        digest.update(file.name.encode() + b"\0" + content)
        if _LOCAL.search(content):
            digest.update(os.fsencode(folder))
    if toolkit:
        digest.update(b"\0toolkit\0" + wheel_digest().encode())
    return digest.hexdigest()[:20]


def cache_dir() -> Path:
    """Return the folder of all environments: in `AGENTCORE_RL_CACHE`, otherwise in the user's cache folder."""
    chosen = os.environ.get("AGENTCORE_RL_CACHE")
    if chosen:
        return Path(chosen) / "agent-environments"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "agentcore-rl" / "agent-environments"


def _run(command: list[str], folder: Path, env: Mapping[str, str] = MappingProxyType({})) -> None:
    failure = "the agent's environment cannot be built"
    env = {**os.environ, **env}
    run_tool(command, within_s=BUILD_TIMEOUT_S, failure=failure, error=LocalRuntimeError, cwd=folder, env=env)
