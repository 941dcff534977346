"""An agent's folder on its way to a node: its files in an archive."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from ...errors import ConfigError

MAX_BUNDLE_BYTES = 64 * 2**20  # of files, before compression: code, not data sets
LEFT_OUT = {"__pycache__", "node_modules", "build", "dist"}


def pack(folder: Path) -> bytes:
    """Pack a folder's files: without hidden ones, caches and environments. Blocks. Raises: ConfigError above 64 MiB."""
    total = 0

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        path = Path(entry.name)
        if path.name.startswith(".") or path.name in LEFT_OUT or (folder / path / "pyvenv.cfg").exists():
            return None
        total += entry.size
        if total > MAX_BUNDLE_BYTES:
            raise ConfigError(
                f"{folder} holds more than {MAX_BUNDLE_BYTES // 2**20} MiB of files, too much to send to every node; "
                "keep the agent's code in a folder of its own and its data in a store"
            )
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3, dereference=True) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name, filter=wanted)
    return buffer.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Make this folder of what was packed. Blocks."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")
