"""Python environments for deployed agents, built with uv from what lies beside the agent's file.

An environment is keyed by what it is made from (dependency files and interpreter), so agents with the same dependencies
share one and a deploy without changes costs nothing. Two deploys of the same at once build it once: the second waits on a
file lock, also across processes. Modules are compiled to bytecode, which halves the start of an agent.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import LocalRuntimeError

BUILD_TIMEOUT_S = 900
_SOURCES = ("uv.lock", "pyproject.toml", "requirements.txt")


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What an agent's environment is made from. ``file`` None: nothing beside the agent says, so it runs in this one.

    ``python``: the version it wants, as in 3.12; None, or this interpreter's: this interpreter.
    """

    folder: Path
    file: Path | None
    lock: Path | None
    python: str | None = None

    @classmethod
    def beside(cls, script: Path, *, python: str | None = None) -> Dependencies:
        """Look for uv.lock + pyproject.toml, pyproject.toml, or requirements.txt in the script's folder."""
        if python == f"{sys.version_info.major}.{sys.version_info.minor}":
            python = None
        folder = script.parent
        lock, project, requirements = (folder / name for name in _SOURCES)
        if project.is_file():
            return cls(folder=folder, file=project, lock=lock if lock.is_file() else None, python=python)
        return cls(folder=folder, file=requirements if requirements.is_file() else None, lock=None, python=python)

    def key(self) -> str:
        digest = hashlib.sha256(f"{sys.executable}\0{sys.version}\0{platform.platform()}\0{self.python}".encode())
        for file in (self.file, self.lock):
            digest.update(b"\0" if file is None else file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:20]


def build(dependencies: Dependencies, root: Path, *, uv: str | None = None) -> Path:
    """The environment's interpreter, built below ``root`` if it is not there yet. Blocks.

    Raises: LocalRuntimeError with uv's output when it cannot be built.
    """
    if dependencies.file is None and dependencies.python is None:
        return Path(sys.executable)
    home = root / dependencies.key()
    python = home / "bin" / "python"
    done = home / "complete"
    if done.exists():
        return python
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{home.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            _install(dependencies, home, uv or find_uv())
            done.touch()
    return python


def cache_dir() -> Path:
    """Where environments are kept: `AGENTCORE_RL_CACHE`, else below the user's cache folder."""
    chosen = os.environ.get("AGENTCORE_RL_CACHE")
    if chosen:
        return Path(chosen) / "agent-environments"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "agentcore-rl" / "agent-environments"


def find_uv() -> str:
    """Path of uv: beside this interpreter, or on PATH. Raises: LocalRuntimeError with how to get it."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise LocalRuntimeError("agents with dependencies of their own need uv: pip install uv")
    return found


def _install(dependencies: Dependencies, home: Path, uv: str) -> None:
    _run([uv, "venv", "--quiet", "--python", dependencies.python or sys.executable, str(home)], dependencies.folder)
    if dependencies.file is None:
        return
    env = {"VIRTUAL_ENV": str(home), "UV_PROJECT_ENVIRONMENT": str(home)}
    if dependencies.lock is not None:
        sync = [
            uv,
            "sync",
            "--quiet",
            "--frozen",
            "--no-dev",
            "--no-install-project",
            "--inexact",
            "--compile-bytecode",
        ]
        _run(sync, dependencies.folder, env)
        return
    python = str(home / "bin" / "python")
    install = [uv, "pip", "install", "--quiet", "--python", python, "--compile-bytecode", "-r", dependencies.file.name]
    _run(install, dependencies.folder, env)


def _run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LocalRuntimeError(f"{' '.join(command)} took longer than {BUILD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise LocalRuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
