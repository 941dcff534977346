"""A Java project in memory, for the agent and the reward. Commands of the agent cannot reach it."""

from __future__ import annotations

import io
import tarfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

PROJECTS = Path(__file__).parent / "projects"
MAX_BYTES, MAX_FILES = 64 << 20, 20_000
_LEFT_OUT = frozenset({"target", ".git"})


@dataclass(frozen=True, kw_only=True)
class JavaProject:
    """The files of a project on Java 8, by path below its root.

    ``tests_that_must_change``: test files that do not compile on 17 as they are. The reward restores all others.
    """

    name: str
    files: Mapping[str, bytes] = field(repr=False)
    breaks: str = ""
    tests_that_must_change: frozenset[str] = frozenset()

    @classmethod
    def named(cls, name: str) -> JavaProject:
        """Return a project of this example. Raises: ValueError if there is no such project."""
        folder = PROJECTS / name
        if name not in names():
            raise ValueError(f"there is no project {name!r}; there are: {', '.join(names())}")
        about = tomllib.loads((folder / "project.toml").read_text())
        must = frozenset(about.get("tests_that_must_change", ()))
        return cls(name=name, files=read_tree(folder / "java8"), breaks=about["breaks"], tests_that_must_change=must)

    @classmethod
    def from_archive(cls, uri: str, tests_that_must_change: Iterable[str] = ()) -> JavaProject:
        """A .tar.gz at `s3://bucket/key` or `file:///path`; one folder at its top is removed. Raises: ValueError."""
        parts = urlsplit(uri)
        if parts.scheme == "s3":
            import boto3  # only for projects in S3

            got = boto3.client("s3").get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))
            if got["ContentLength"] > MAX_BYTES:
                raise ValueError(f"{uri} is larger than {MAX_BYTES >> 20} MiB")
            data = got["Body"].read()
        elif parts.scheme == "file":
            data = Path(unquote(parts.path)).read_bytes()
        else:
            raise ValueError(f"a repo_uri is s3://bucket/key or file:///path, got {uri!r}")
        name = PurePosixPath(parts.path).name.removesuffix(".gz").removesuffix(".tgz").removesuffix(".tar")
        return cls(name=name, files=_unpack(data, uri), tests_that_must_change=frozenset(tests_that_must_change))

    def write(self, folder: Path) -> None:
        """The whole project into a new folder."""
        write_tree(folder, self.files)

    def text(self, path: str) -> str:
        return self.files[path].decode(errors="replace")

    @property
    def tests(self) -> list[str]:
        """The paths of the test sources."""
        return [path for path in self.files if is_test(path) and path.endswith(".java")]

    @property
    def mains(self) -> list[str]:
        """The paths of the main sources, without package-info and module-info."""
        return [
            path
            for path in self.files
            if path.endswith(".java") and "/src/main/java/" in f"/{path}" and not path.endswith("-info.java")
        ]


def names() -> list[str]:
    """The projects that come with this example."""
    return sorted(path.parent.name for path in PROJECTS.glob("*/project.toml"))


def is_test(path: str) -> bool:
    """Return True if a file belongs to the tests: their sources and resources."""
    return "/src/test/" in f"/{path}"


def read_tree(folder: Path) -> dict[str, bytes]:
    """The regular files below a folder; links, build outputs and the repository's own files are left out.

    Raises: ValueError for a tree above MAX_FILES files or MAX_BYTES.
    """
    files: dict[str, bytes] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_symlink() or not path.is_file() or _LEFT_OUT & set(relative.parts[:-1]):
            continue
        if not path.parent.resolve().is_relative_to(folder.resolve()):  # below a link
            continue
        size += path.stat().st_size
        if len(files) >= MAX_FILES or size > MAX_BYTES:
            raise ValueError(f"{folder} holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
        files[relative.as_posix()] = path.read_bytes()
    return files


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder."""
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _unpack(data: bytes, uri: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    size = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if not member.isfile() or _LEFT_OUT & set(path.parts[:-1]):
                    continue
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"{uri} holds {member.name!r}, which leads out of its folder")
                size += member.size
                if len(files) >= MAX_FILES or size > MAX_BYTES:
                    raise ValueError(f"{uri} holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
                content = archive.extractfile(member)
                files[path.as_posix()] = content.read() if content is not None else b""
    except (tarfile.TarError, EOFError, OSError) as e:
        raise ValueError(f"{uri} is not a readable .tar.gz: {e}") from e
    tops = {path.partition("/")[0] for path in files}
    if len(tops) == 1 and "pom.xml" not in files:
        files = {path.partition("/")[2]: content for path, content in files.items()}
    if "pom.xml" not in files:
        raise ValueError(f"{uri} has no pom.xml at its top")
    return files
