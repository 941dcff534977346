"""Buckets and objects in a directory.

::

    ROOT/.lock                       held by the one server of this directory
    ROOT/.new/<random>               files being written; emptied at start
    ROOT/.uploads/<upload id>/       multipart uploads: `upload.json`, one file per part
    ROOT/<bucket>/.bucket            marks a bucket
    ROOT/<bucket>/<hh>/<hash of key> one object: a line of JSON (what is known about it), then its bytes

An object is one file, so it appears, is replaced and disappears whole, by rename and unlink; after a crash there is the old
object or the new one. Names are hashes: a key may be anything, also a prefix of another key, and cannot lead out of the
directory. The keys are kept sorted in memory, read from the files at start.

All changes happen on one thread, without a gap between the check of a condition and the rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .._installation import missing_extra
from ..errors import ConfigError
from .wire.errors import S3Error

try:
    from sortedcontainers import SortedList
except ImportError as e:
    raise missing_extra("the S3 endpoint needs sortedcontainers", "runtime") from e

log = logging.getLogger(__name__)
_FIRST_READ = 4096
_MOST_KNOWN = 2**20  # bytes of an object's first line; that of an upload of 10,000 parts has some hundred thousand
# Others may write into the directory: what lies there is not followed, and opening it does not wait.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
PIECE_BYTES = 2**20  # of bodies that are worth a thread, and read and written so many bytes at a time


@dataclass(slots=True, kw_only=True)
class StoredObject:
    """What is known of an object besides its bytes. ``body_offset`` is where those begin in its file."""

    key: str
    etag: str
    size: int
    modified_s: float
    headers: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    checksum_type: str | None = None
    part_sizes: list[int] | None = None
    body_offset: int = 0
    listed: str = ""  # its entry in a listing without the key, kept because listings are asked for again and again

    def to_line(self, width: int = 0) -> bytes:
        """The first line of the file, padded to ``width`` bytes."""
        known: dict[str, Any] = {"key": self.key, "etag": self.etag, "size": self.size, "modified": self.modified_s}
        for name in ("headers", "checksums", "checksum_type", "part_sizes"):
            if value := getattr(self, name):
                known[name] = value
        line = json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
        return line.ljust(width - 1) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> StoredObject:
        known = json.loads(line.decode("utf-8", "surrogateescape"))
        known["modified_s"] = known.pop("modified")
        return cls(**known, body_offset=len(line))


class Bucket:
    """The objects of one bucket, by key, in order."""

    def __init__(self, name: str, created_s: float) -> None:
        self.name = name
        self.created_s = created_s
        self.objects: dict[str, StoredObject] = {}
        self.keys = SortedList()


class Disk:
    """The directory. ``fsync`` makes every change survive a power failure, not only the end of the process.

    Raises: ConfigError when another server already serves the directory.
    """

    def __init__(self, root: str | Path, *, fsync: bool = False) -> None:
        self.root = Path(root).absolute()
        self.fsync = fsync
        for directory in (self.root, self.root / ".new", self.root / ".uploads"):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        for left_over in (self.root / ".new").iterdir():
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over, ignore_errors=True)
            else:
                left_over.unlink()
        self.buckets: dict[str, Bucket] = {}
        for path in sorted(self.root.iterdir()):
            if os.path.isfile(path / ".bucket") and not path.is_symlink():
                self.buckets[path.name] = self._load(path)

    def _take_lock(self) -> IO[bytes]:
        lock = open(self.root / ".lock", "ab")  # noqa: SIM115 - held until close()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ConfigError(
                f"{self.root} is already served by another process; give each server its own directory"
            ) from None
        return lock

    def _load(self, path: Path) -> Bucket:
        bucket = Bucket(path.name, (path / ".bucket").stat().st_mtime)
        strange: list[str] = []
        for file in _files(path):
            stored = read_stored(file)
            if stored is not None and self.path_of(path.name, stored.key) == file:
                bucket.objects[stored.key] = stored
            else:
                strange.append(file)
        if strange:
            log.warning("%d things in %s are no objects and are left out, such as %r", len(strange), path, strange[0])
        bucket.keys = SortedList(bucket.objects)
        return bucket

    def close(self) -> None:
        """Let another server have the directory."""
        self._lock.close()

    def create_bucket(self, name: str) -> Bucket:
        path = self.root / name
        path.mkdir(exist_ok=True)
        (path / ".bucket").touch()
        self.sync_directory(self.root)
        bucket = self.buckets[name] = Bucket(name, time.time())
        return bucket

    def delete_bucket(self, bucket: Bucket) -> None:
        """Remove an empty bucket."""
        path = self.root / bucket.name
        (path / ".bucket").unlink()
        del self.buckets[bucket.name]
        shutil.rmtree(path, ignore_errors=True)

    def path_of(self, bucket: str, key: str) -> str:
        name = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        return f"{self.root}/{bucket}/{name[:2]}/{name}"

    def new_file(self) -> str:
        """A name for a file being written, on the same file system as all objects."""
        return f"{self.root}/.new/{os.urandom(12).hex()}"

    def place(self, bucket: Bucket, stored: StoredObject, file: str) -> None:
        """Make a finished file the object of its key."""
        target = self.path_of(bucket.name, stored.key)
        try:
            os.rename(file, target)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(file, target)
        if stored.key not in bucket.objects:
            bucket.keys.add(stored.key)
        bucket.objects[stored.key] = stored

    def remove(self, bucket: Bucket, key: str) -> None:
        """Remove an object, if it is there."""
        if bucket.objects.pop(key, None) is not None:
            bucket.keys.remove(key)
            path = self.path_of(bucket.name, key)
            os.unlink(path)
            self.sync_directory(os.path.dirname(path))

    def open_body(self, bucket: Bucket, stored: StoredObject) -> int:
        """A descriptor of the object's file, to be read from ``body_offset`` on."""
        return os.open(self.path_of(bucket.name, stored.key), _READ)

    def sync_directory(self, path: str | Path) -> None:
        if self.fsync:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def pieces(fd: int, offset: int, length: int) -> Iterator[bytes]:
    """``length`` bytes of an open file, piece by piece. Blocks. Raises: S3Error when it is shorter."""
    end = offset + length
    while offset < end:
        piece = os.pread(fd, min(PIECE_BYTES, end - offset), offset)
        if not piece:
            raise S3Error("InternalError")
        offset += len(piece)
        yield piece


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def discard_file(file: str) -> None:
    """Remove a file that was written but not placed; one that was placed is no longer there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)


def _files(path: Path) -> Iterator[str]:
    with os.scandir(path) as folders:
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                try:
                    with os.scandir(folder.path) as files:
                        yield from (f.path for f in files)
                except OSError:  # a folder without permissions; it counts as one thing that is no object
                    yield folder.path


def read_stored(file: str) -> StoredObject | None:
    """What the file says of itself; None when it is not one of ours (a stranger's file, or torn by a power failure)."""
    try:
        fd = os.open(file, _READ)
    except OSError:  # a link, a socket, a file without permissions
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        head = os.read(fd, _FIRST_READ)
        while b"\n" not in head and len(head) < _MOST_KNOWN and (more := os.read(fd, _FIRST_READ)):
            head += more
        stored = StoredObject.from_line(head[: head.index(b"\n") + 1])
        key: Any = stored.key  # of whatever kind the file says
        whole = isinstance(key, str) and stored.body_offset + stored.size == found.st_size
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    finally:
        os.close(fd)
    return stored if whole else None
