"""Harbor tasks: read from a folder, sent to a session as an archive without their solution, kept in memory.

    python harbor_tasks.py TASK_FOLDER      # the payload of one task, as one line of JSON

A task is a folder with `task.toml`, `instruction.md`, `environment/` (a Dockerfile and what it copies), `tests/test.sh`, and
`solution/solve.sh`. Sources: harborframework.com/docs/tasks; the fields of `task.toml` and their defaults are Harbor's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_BYTES = 32 << 20


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore")  # tasks carry fields for other runners


class Limits(_Section):
    """``[agent]`` and ``[verifier]``. Units: seconds."""

    timeout_sec: float | None = Field(default=None, gt=0)
    env: dict[str, str] = {}
    user: str | int | None = None


class Solution(_Section):
    env: dict[str, str] = {}


class EnvironmentSettings(_Section):
    """``[environment]``. Units: seconds, MiB."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    cpus: float = Field(default=1, gt=0)
    memory_mb: int = Field(default=2048, gt=0)
    gpus: int = 0
    allow_internet: bool = True
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    workdir: str | None = None
    env: dict[str, str] = {}

    @property
    def network(self) -> bool:
        return self.allow_internet if self.network_mode is None else self.network_mode == "public"


class TaskSettings(_Section):
    """The fields of `task.toml` that this example uses."""

    metadata: dict[str, Any] = {}
    agent: Limits = Limits()
    verifier: Limits = Limits()
    environment: EnvironmentSettings = EnvironmentSettings()
    solution: Solution = Solution()


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task. Its three folders are files by path. ``solution`` is None if it was left out."""

    name: str
    instruction: str
    settings: TaskSettings
    environment: Mapping[str, bytes] = field(repr=False)
    tests: Mapping[str, bytes] = field(repr=False)
    solution: Mapping[str, bytes] | None = field(repr=False)
    toml: bytes = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a task's folder. Raises: ValueError with the missing or wrong part."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
        }
        return cls.of(folder.resolve().name, files)

    @classmethod
    def of(cls, name: str, files: Mapping[str, bytes]) -> HarborTask:
        """A task of these files, by path. Raises: ValueError."""
        for needed in ("task.toml", "instruction.md", "tests/test.sh"):
            if needed not in files:
                raise ValueError(f"task {name}: there is no {needed}")
        try:
            settings = TaskSettings.model_validate(tomllib.loads(files["task.toml"].decode()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as e:
            raise ValueError(f"task {name}: task.toml cannot be read: {e}") from e
        if any(path.startswith("steps/") for path in files):
            raise ValueError(f"task {name} has several steps, which are not run here")
        if settings.environment.gpus or settings.environment.network_mode == "allowlist":
            raise ValueError(
                f"task {name} asks for GPUs or for a list of allowed hosts, which no sandbox here provides"
            )
        solution = _below(files, "solution")
        return cls(
            name=name,
            instruction=files["instruction.md"].decode(errors="replace"),
            settings=settings,
            environment=_below(files, "environment"),
            tests=_below(files, "tests"),
            solution=solution or None,
            toml=files["task.toml"],
        )

    @property
    def digest(self) -> str:
        """A hash of everything in it."""
        made = hashlib.sha256()
        for path, data in sorted(self.files().items()):
            made.update(f"{len(path)} {path} {len(data)} ".encode() + data)
        return made.hexdigest()

    def files(self) -> dict[str, bytes]:
        out = {"task.toml": self.toml, "instruction.md": self.instruction.encode()}
        for folder in ("environment", "tests", "solution"):
            out |= {f"{folder}/{path}": data for path, data in (getattr(self, folder) or {}).items()}
        return out

    def without_solution(self) -> HarborTask:
        return replace(self, solution=None)

    def payload(self) -> dict[str, str]:
        """Return the payload of a session: the name and the archive of the task, without the solution."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
            for path, data in self.without_solution().files().items():
                info = tarfile.TarInfo(path)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return {"task": self.name, "task_archive": base64.b64encode(buffer.getvalue()).decode()}

    @classmethod
    def from_archive(cls, name: str, archive: str) -> HarborTask:
        """The task of a payload. Raises: ValueError."""
        files: dict[str, bytes] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive, validate=True)), mode="r:gz") as packed:
                for member in packed:
                    path = PurePosixPath(member.name)
                    if path.is_absolute() or ".." in path.parts:
                        raise ValueError(f"task_archive holds {member.name!r}, which leads out of its folder")
                    if sum(map(len, files.values())) + member.size > MAX_BYTES:
                        raise ValueError(f"task_archive unpacks to more than {MAX_BYTES >> 20} MiB")
                    content = packed.extractfile(member) if member.isfile() else None
                    if content is not None:
                        files[path.as_posix()] = content.read()
        except (binascii.Error, tarfile.TarError, EOFError, OSError) as e:
            raise ValueError(f"task_archive is not a .tar.gz in base64: {e}") from e
        return cls.of(name, files)


def read_tasks(folder: Path) -> list[HarborTask]:
    """Read all tasks below a folder, by name, or the task in this folder. Raises: ValueError if there is none."""
    if (folder / "task.toml").is_file():
        return [HarborTask.read(folder)]
    found = [HarborTask.read(path.parent) for path in sorted(folder.glob("*/task.toml"))]
    if not found:
        raise ValueError(f"{folder} contains no task: there is no task.toml in it or in its subfolders")
    return found


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {path.removeprefix(f"{folder}/"): data for path, data in files.items() if path.startswith(f"{folder}/")}


if __name__ == "__main__":
    print(json.dumps(HarborTask.read(Path(sys.argv[1])).payload()))
