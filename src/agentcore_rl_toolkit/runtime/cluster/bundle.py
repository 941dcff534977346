"""An agent's project on its way to the nodes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Collection
from pathlib import Path

from ...errors import ConfigError
from ...isolation.sandbox import project_of

MAX_BUNDLE_BYTES = 64 * 2**20  # before compression: code, not data sets
LEFT_OUT = {"__pycache__", "node_modules", "build", "dist"}


def pack_project(script: Path, hidden: Collection[Path] = ()) -> tuple[str, bytes]:
    """Pack an agent's project, as its sandbox shows it. Blocks. Raises: ConfigError if it is too large.

    Returns the path of the agent's file in it, and the archive.
    """
    folder = project_of(script)
    if not folder.is_dir():
        folder = script.parent
    return str(script.relative_to(folder)), pack(folder, hidden)


def pack(folder: Path, hidden: Collection[Path] = ()) -> bytes:
    """Pack a folder's files: without hidden ones, caches and environments. Blocks. Raises: ConfigError above 64 MiB."""
    total, buffer = 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3, dereference=True) as archive:
        for base, folders, names in os.walk(folder):
            inner = (name for name in sorted(folders) if not name.startswith(".") and name not in LEFT_OUT)
            folders[:] = [name for name in inner if not Path(base, name, "pyvenv.cfg").exists()]
            for path in (Path(base, name) for name in sorted(names) if not name.startswith(".")):
                is_hidden = any(path.resolve().is_relative_to(other.resolve()) for other in hidden)
                if is_hidden or not path.is_file():  # a link to nothing, a socket
                    continue
                total += path.stat().st_size
                if total > MAX_BUNDLE_BYTES:
                    raise ConfigError(
                        f"{folder} has more than {MAX_BUNDLE_BYTES // 2**20} MiB of files, too much to send to every node: keep "
                        "the agent's code in a separate folder, and its data in a store"
                    )
                archive.add(path, path.relative_to(folder), recursive=False)
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Unpack an archive into this folder. Blocks."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        archive.extractall(folder)
