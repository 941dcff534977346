"""Python environments for deployed agents, built with uv from what lies beside the agent's file.

An environment is keyed by what it is made from (dependency files, what they name on this machine, and interpreter), so agents
with the same dependencies share one and a deploy without changes costs nothing. Two deploys of the same at once build it once:
the second waits on a file lock, also across processes. Modules are compiled to bytecode, which halves the start of an agent.

An agent that imports this toolkit gets the version that runs here, from a wheel written for it: under its name the package index
has another product. Dependency files that say which version they want, or where it comes from, are followed.

Nothing removes an environment: uv links most of its files from its own cache. The folder may be deleted while no agent runs.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from ..._installation import write_wheel
from ...errors import LocalRuntimeError
from ...isolation.project import Project

BUILD_TIMEOUT_S = 900
_LISTED = re.compile(r"(?:-r|-c|--requirement|--constraint)(?:\s+|=)?(\S+)")
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s+|=)?")
_TOML_PATH = re.compile(r"\b(?:path|directory|editable|virtual)\s*=\s*\"([^\"]+)\"")
# This toolkit as a requirement: what follows its name says which version, or where from.
_TOOLKIT = re.compile(
    r"(?<![\w./-])agentcore[-_.]rl[-_.]toolkit(?:\[[^\]]*\])?[ \t]*((?:[=<>!~]=?|@)[^\"'#;\n]*)?", re.IGNORECASE
)
_NOT_SOURCE = ("__pycache__", "node_modules", "build", "dist")


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What an agent's environment is made from. ``file`` None: nothing beside the agent says, so it runs in this one.

    ``toolkit``: it uses this toolkit, and no file says which version.
    """

    folder: Path
    file: Path | None
    lock: Path | None
    toolkit: bool = False

    @classmethod
    def beside(cls, script: Path) -> Dependencies:
        """Look for uv.lock + pyproject.toml, pyproject.toml, or requirements.txt in the script's project."""
        project = Project.of(script)
        folder, file = project.folder, project.dependencies
        lock = folder / "uv.lock"
        lock_file = lock if file is not None and file.suffix == ".toml" and lock.is_file() else None
        toolkit = file is not None and lock_file is None and _wants_toolkit({folder, script.parent}, file)
        return cls(folder=folder, file=file, lock=lock_file, toolkit=toolkit)

    def key(self) -> str:
        digest = hashlib.sha256(f"{sys.executable}\0{sys.version}\0{platform.platform()}".encode())
        for file in (self.file, self.lock):
            digest.update(b"\0" if file is None else file.name.encode() + b"\0" + file.read_bytes())
        if self.toolkit:
            digest.update(b"\0toolkit\0" + toolkit_wheel().parent.name.encode())
        for path in self.named():
            digest.update(b"\0" + os.fsencode(path) + b"\0" + _content(path))
        return digest.hexdigest()[:20]

    def named(self) -> list[Path]:
        """The files and folders of this machine that the dependency files name, directly or through one another."""
        found: dict[Path, None] = {}
        waiting = [file for file in (self.file, self.lock) if file is not None]
        while waiting:
            file = waiting.pop()
            for path, is_list in _named_in(file):
                if path not in found and path.exists():
                    found[path] = None
                    if is_list:
                        waiting.append(path)
        return sorted(found)


def _wants_toolkit(folders: Iterable[Path], file: Path) -> bool:
    """Whether the agent's modules import this toolkit and its dependency files leave open where it comes from."""
    text = file.read_text(errors="replace")
    given = _TOOLKIT.findall(text)
    if any(version.strip() for version in given) or re.search(r"agentcore_rl_toolkit-[^/\s]*\.whl", text):
        return False
    if given:
        return True
    return any(b"agentcore_rl_toolkit" in path.read_bytes() for folder in folders for path in folder.glob("*.py"))


@functools.cache
def toolkit_wheel() -> Path:
    """The wheel of the version that runs here, in a folder of the cache named after its content."""
    wheels = cache_dir().with_name("wheels")
    wheels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheels) as scratch:
        made = write_wheel(Path(scratch))
        home = wheels / hashlib.sha256(made.read_bytes()).hexdigest()[:20]
        home.mkdir(exist_ok=True)
        wheel = made.replace(home / made.name)
    return wheel


def _named_in(file: Path) -> Iterator[tuple[Path, bool]]:
    """What one dependency file names, and whether that is a list of requirements itself."""
    text = file.read_text(errors="replace")
    if file.suffix in (".toml", ".lock"):
        for match in _TOML_PATH.finditer(text):
            yield (file.parent / match[1]).resolve(), False
        if "dynamic" in text:  # then other files may hold the dependencies
            for path in sorted((*file.parent.glob("*requirements*.txt"), *file.parent.glob("setup.*"))):
                yield path.resolve(), path.suffix == ".txt"
        return
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition(" #")[0].strip()
        if not words or words.startswith("#"):
            continue
        listed = _LISTED.match(words)
        if listed is not None:
            yield (file.parent / listed[1].strip("\"'")).resolve(), True
            continue
        editable = _EDITABLE.match(words)
        target = words[editable.end() :] if editable is not None else words
        target = re.split(r"\s;|\[", target.rpartition(" @ ")[2])[0].strip()
        if target.startswith("file:"):
            yield (file.parent / unquote(target.removeprefix("file:").removeprefix("//"))).resolve(), False
        elif "://" not in target and (editable is not None or "/" in target):
            yield (file.parent / target).resolve(), False


def _content(path: Path) -> bytes:
    """What stands for a file, or for a folder, of which names, sizes and times have to do."""
    if path.is_file():
        return path.read_bytes()
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_SOURCE)
        for name in sorted(files):
            info = os.lstat(os.path.join(folder, name))
            digest.update(f"{folder}\0{name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode(errors="surrogatepass"))
    return digest.digest()


def build(dependencies: Dependencies, root: Path, *, uv: str | None = None) -> Path:
    """The environment's interpreter, built below ``root`` if it is not there yet. Blocks.

    Raises: LocalRuntimeError with uv's output when it cannot be built.
    """
    if dependencies.file is None:
        return Path(sys.executable)
    home = root / dependencies.key()
    python = home / "bin" / "python"
    done = home / "complete"
    root.mkdir(parents=True, exist_ok=True)
    if done.exists():
        return python
    with (root / f"{home.name}.lock").open("a") as lock:
        _wait_for(lock)
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            _install(dependencies, dependencies.file.name, home, uv or find_uv(), lock.fileno())
            done.touch()
    return python


def _wait_for(lock: IO[str]) -> None:
    """Take the lock. Raises: LocalRuntimeError when whoever builds the same takes longer than a build may."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LocalRuntimeError(
                    f"another process has been building the same environment for {BUILD_TIMEOUT_S} s; it holds {lock.name}"
                ) from None
            time.sleep(0.1)


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


def _install(dependencies: Dependencies, file: str, home: Path, uv: str, lock: int) -> None:
    """``lock``: a descriptor that uv inherits, so that the lock is held as long as uv runs, should this process be killed."""
    make = [uv, "venv", "--quiet", "--python", sys.executable, str(home)]
    _run(make, dependencies.folder, lock)
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
        _run(sync, dependencies.folder, lock, env)
        return
    python = str(home / "bin" / "python")
    install = [uv, "pip", "install", "--quiet", "--python", python, "--compile-bytecode", "-r", file]
    if dependencies.toolkit:
        wheel = f"agentcore-rl-toolkit @ {toolkit_wheel().as_uri()}"
        override = home / "toolkit.txt"
        override.write_text(f"{wheel}\n")
        install += ["--override", str(override), wheel]
    _run(install, dependencies.folder, lock, env)


def _run(command: list[str], folder: Path, lock: int, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            pass_fds=(lock,),
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LocalRuntimeError(f"{' '.join(command)} took longer than {BUILD_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise LocalRuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
