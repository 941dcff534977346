"""An agent's code on its way to the nodes: the script's folder as one archive, named by its content.

A node unpacks each content once and keeps it; the same folder deployed again, or on another day, is not sent again.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

MAX_BUNDLE_BYTES = 64 * 2**20  # of files, before compression: code, not data sets
LEFT_OUT = {"__pycache__", "node_modules", "build", "dist"}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A packed folder. ``key`` is the hash of its files' names, modes and contents."""

    key: str
    data: bytes


def pack(folder: Path) -> Bundle:
    """Pack a folder's files: without hidden ones, caches and environments. The same files give the same bundle. Blocks.

    Raises: ConfigError above 64 MiB.
    """
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as archive:
        for path in _files(folder):
            content = path.read_bytes()
            total += len(content)
            if total > MAX_BUNDLE_BYTES:
                raise ConfigError(
                    f"{folder} holds more than {MAX_BUNDLE_BYTES // 2**20} MiB of files, too much to send to every node; "
                    "keep the agent's code in a folder of its own and its data in a store"
                )
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size, info.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
            digest.update(f"{info.name}\0{info.mode}\0{info.size}\0".encode() + content)
            archive.addfile(info, io.BytesIO(content))
    return Bundle(key=digest.hexdigest()[:32], data=buffer.getvalue())


def _files(folder: Path) -> list[Path]:
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in LEFT_OUT and not Path(base, name, "pyvenv.cfg").exists()
        )
        found += [Path(base, n) for n in names if not n.startswith(".") and not n.endswith((".pyc", ".sock"))]
    return sorted(path for path in found if path.is_file())


def unpack(data: bytes, key: str, root: Path) -> Path:
    """Unpack below ``root`` into a folder named by the key, at once or not at all. Returns it. Blocks."""
    target = root / key
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
    try:
        partial.chmod(0o755)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(partial, filter="data")
        try:
            partial.rename(target)
        except OSError:
            if not target.exists():  # somebody else was first otherwise
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
