"""The folder that one rollout works in: every path stays inside, sizes are bounded, it is removed at the end."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from .errors import OfficeError, UnreadableFileError

MAX_FILE_BYTES = 16 * 2**20  # the largest file of the benchmark has 2.6 MB
MAX_TOTAL_BYTES = 64 * 2**20
MAX_FILES = 500
FOLDERS = ("data", "calendar", "emails")


class Workspace:
    """Files below one folder, by their names relative to it; `/testbed/data/x` is another way to write `data/x`.

    A path that leaves the folder, by `..`, by being absolute, or through a symbolic link, is an `OfficeError`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, name: str) -> Path:
        """Return the path of this name.

        Raises: OfficeError if that is outside the workspace, or a symbolic link.
        """
        if not isinstance(name, str) or not name.strip():
            raise OfficeError("a file name is needed")
        text = name.strip()
        if "\0" in text or len(text) > 300 or any(len(part.encode()) > 200 for part in text.split("/")):
            raise OfficeError("the file name is too long or has characters that no file name can have")
        if text == "/testbed" or text.startswith("/testbed/"):
            text = text.removeprefix("/testbed").lstrip("/") or "."
        if text.startswith(("/", "~")):
            raise OfficeError(f"{name} is outside the workspace: use names like data/report.docx")
        parts: list[str] = []
        for part in PurePosixPath(text).parts:
            if part == "..":
                if not parts:
                    raise OfficeError(f"{name} is outside the workspace: use names like data/report.docx")
                parts.pop()
            else:
                parts.append(part)
        path = self.root
        for part in parts:
            path = path / part
            if path.is_symlink():
                raise OfficeError(f"{name} is a symbolic link, which the workspace does not follow")
        return path

    def file(self, name: str) -> Path:
        """The path of a regular file that is there and not too large.

        Raises: UnreadableFileError if there is none.
        """
        path = self.path(name)
        try:
            info = path.lstat()
        except OSError:
            raise UnreadableFileError(f"there is no file {name}{self._similar(path)}") from None
        if not stat.S_ISREG(info.st_mode):
            raise UnreadableFileError(f"{name} is not a file")
        if info.st_size > MAX_FILE_BYTES:
            raise UnreadableFileError(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MB")
        return path

    def folder(self, name: str) -> Path:
        """The path of a folder that is there.

        Raises: OfficeError if there is none.
        """
        path = self.path(name)
        if not path.is_dir():
            raise OfficeError(f"there is no folder {name}")
        return path

    def read(self, name: str) -> bytes:
        """The bytes of a file. Raises: UnreadableFileError."""
        return self.file(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole, making its folder; a reader never sees half of it.

        Raises: OfficeError if it is outside the workspace, is a folder, or passes the bounds.
        """
        path = self.path(name)
        if path == self.root or path.is_dir():
            raise OfficeError(f"{name} is a folder")
        if len(data) > MAX_FILE_BYTES:
            raise OfficeError(f"{name} would be larger than {MAX_FILE_BYTES // 2**20} MB")
        self.make_folder(self.name(path.parent))
        self.check_room(more_bytes=len(data), more_files=0 if path.exists() else 1)
        partial = path.with_name(f".{path.name[:40]}.partial")
        partial.write_bytes(data)
        os.replace(partial, path)

    def make_folder(self, name: str) -> None:
        """Make a folder and those above it. Raises: OfficeError if a file is in the way."""
        path = self.path(name)
        if path.is_dir():
            return
        self.check_room(more_files=1)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise OfficeError(f"{name} cannot be made: a file of that name is in the way") from None

    def check_room(self, *, more_bytes: int = 0, more_files: int = 0) -> None:
        """Raises: OfficeError if this much more would pass the workspace's bounds."""
        sizes = [path.lstat().st_size for path in self.root.rglob("*")]
        if sum(sizes) + more_bytes > MAX_TOTAL_BYTES or len(sizes) + more_files > MAX_FILES:
            raise OfficeError(f"the workspace is full: {MAX_TOTAL_BYTES // 2**20} MB or {MAX_FILES} files")

    def name(self, path: Path) -> str:
        """A path of this workspace as the model writes it."""
        return path.relative_to(self.root).as_posix()

    def _similar(self, path: Path) -> str:
        """Return the names next to a missing file, for a model that mistyped."""
        if path.parent.is_dir() and (names := sorted(other.name for other in path.parent.iterdir())):
            return f"; {self.name(path.parent)} holds: {', '.join(names[:20])}"
        return ""


@contextmanager
def new_workspace(testbed: Path | None) -> Iterator[Workspace]:
    """A workspace with a copy of a task's files, removed at the end, whatever happened."""
    root = Path(tempfile.mkdtemp(prefix="officebench-"))
    try:
        if testbed is not None and testbed.is_dir():
            shutil.copytree(testbed, root, dirs_exist_ok=True, copy_function=shutil.copyfile)
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            folder.chmod(0o700)  # tasks may be in read-only folders
        for name in FOLDERS:
            (root / name).mkdir(exist_ok=True)
        yield Workspace(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
