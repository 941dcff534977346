"""Packs an agent's folder into an archive for a node."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from ...errors import ConfigError

MAX_BUNDLE_BYTES = 64 * 2**20  # of files, before compression: code, not data sets
LEFT_OUT = {"__pycache__", "node_modules", "build", "dist"}


def pack(folder: Path) -> bytes:
    """Pack a folder's files: without hidden ones, caches and environments. Blocks. Raises: ConfigError above 64 MiB."""
    total, buffer = 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3, dereference=True) as archive:
        for base, folders, names in os.walk(folder):
            inner = (name for name in sorted(folders) if not name.startswith(".") and name not in LEFT_OUT)
            folders[:] = [name for name in inner if not Path(base, name, "pyvenv.cfg").exists()]
            for path in (Path(base, name) for name in sorted(names) if not name.startswith(".")):
                if not path.is_file():  # a link to nothing, a socket
                    continue
                total += path.stat().st_size
                if total > MAX_BUNDLE_BYTES:
                    raise ConfigError(
                        f"{folder} holds more than {MAX_BUNDLE_BYTES // 2**20} MiB of files, too much to send to every node; "
                        "keep the agent's code in a folder of its own and its data in a store"
                    )
                archive.add(path, path.relative_to(folder), recursive=False)
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Make this folder of what was packed. Blocks."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")
