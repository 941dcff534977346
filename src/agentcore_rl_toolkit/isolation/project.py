"""The project of an agent's file: its import path, and the file that lists its packages.

Standard library only, for Python 3.10: this also runs in the environments of agents.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINKS = 2_000  # each takes some 5 µs of a session's start
# Code, and the prompts that agents read as they are loaded.
_SOURCES = (".py", ".md", ".txt", ".jinja", ".jinja2", ".j2", ".yaml", ".yml", ".toml")
_NOT_SOURCE = ("__pycache__", "node_modules", "build", "dist", "runs")


@dataclass(frozen=True)
class Project:
    """An agent's file as `python -m` would run it.

    ``package`` is the package that the file is a module of, empty where it is a script. Absolute imports begin in ``root``.
    ``folder`` is the project's: in it one would type `python -m`.
    """

    script: Path
    root: Path
    package: str
    folder: Path

    @classmethod
    def of(cls, script: Path) -> Project:
        """Follow `__init__.py` upwards, and relative imports as far up as they reach."""
        depth = 0
        while depth < len(script.parents) - 1 and (script.parents[depth] / "__init__.py").is_file():
            depth += 1
        depth = min(max(depth, _reach_of_imports(script)), len(script.parents) - 1)
        root = script.parents[depth]
        package = ".".join(folder.name for folder in reversed(script.parents[:depth]))
        places = [*script.parents[: depth + 1], *([root.parent] if root.name == "src" else [])]
        with_dependencies = (folder for folder in places if _dependency_file(folder) is not None)
        return cls(script, root, package, next(with_dependencies, places[-1] if package else script.parent))

    @property
    def module(self) -> str:
        """Its name for `python -m`."""
        return f"{self.package}.{self.script.stem}" if self.package else self.script.stem

    @property
    def import_paths(self) -> list[str]:
        """The first folders of the import path, with the file's own folder and the `src` of its project."""
        folders = [self.root, self.script.parent, self.folder / "src"]
        return list(dict.fromkeys(str(folder) for folder in folders if folder.is_dir()))

    @property
    def shown(self) -> list[str]:
        """The folders whose files sessions find in their own."""
        return list(dict.fromkeys((str(self.folder), str(self.script.parent))))

    @property
    def dependencies(self) -> Path | None:
        """The pyproject.toml or requirements.txt with the packages that the agent needs."""
        return _dependency_file(self.folder)

    def digest(self) -> str:
        """Return a digest of the project's Python files, prompts and dependency file. It changes with each edit."""
        found = hashlib.sha256()
        for path in self._sources():
            with contextlib.suppress(OSError):  # a link to nothing, or a file that was deleted meanwhile
                state = path.stat()
                found.update(os.fsencode(path) + f" {state.st_size} {state.st_mtime_ns}\0".encode())
        return found.hexdigest()

    def _sources(self) -> Iterator[Path]:
        if self.dependencies is not None:
            yield self.dependencies
        top = self.root / self.package.partition(".")[0]
        folders = [*map(str, dict.fromkeys((top, self.folder / "src")))]
        for folder in folders:  # it grows: os.walk is recursive in Python 3.11
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:  # missing, not readable, or its path is too long
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    is_left_out = entry.name.startswith(".") or entry.name in _NOT_SOURCE
                    if not is_left_out and not os.path.exists(f"{entry.path}/pyvenv.cfg"):
                        folders.append(entry.path)
                elif entry.name.endswith(_SOURCES):
                    yield Path(entry.path)


def link_files(folders: Iterable[str], directory: str, copied: Iterable[str] = ()) -> None:
    """Show an agent's files in a session's folder, as in a container's /app. Copy the paths in ``copied``."""
    for folder in folders:
        names = sorted(os.listdir(folder))
        if len(names) > MAX_LINKS:
            print(f"{folder} has {len(names)} entries; sessions find the first {MAX_LINKS} in theirs", file=sys.stderr)
        for name in names[:MAX_LINKS]:
            source, target = os.path.join(folder, name), os.path.join(directory, name)
            if name.startswith(".") or name in ("__pycache__", "tmp") or os.path.lexists(target):
                continue
            if source in copied:
                copy = shutil.copytree if os.path.isdir(source) else shutil.copy2
                copy(source, target)
            elif any(path.startswith(f"{source}/") for path in copied):
                os.mkdir(target)
                link_files([source], target, copied)
            else:
                os.symlink(source, target)


def _dependency_file(folder: Path) -> Path | None:
    project, requirements = folder / "pyproject.toml", folder / "requirements.txt"
    if project.is_file() and "[project]" in project.read_text(errors="replace"):
        return project
    return requirements if requirements.is_file() else None


def _reach_of_imports(script: Path) -> int:
    """Count the folders that the relative imports of a file go up. 0 if it has none, or is not Python."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 0
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
