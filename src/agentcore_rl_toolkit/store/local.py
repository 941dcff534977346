"""Objects as files in a directory: atomic, create-only on request, fsynced, readable with ordinary tools.

Written with the standard library rather than obstore's local store: it can fsync, a first put costs a forked session under 1 ms
of CPU (obstore's some 20 ms), and the names of unfinished files differ from those of objects.

A key is the path of its file. A put writes ``.tmp-<random>`` in the same folder, then renames it (or, for create-only, hard-links
it, which the file system refuses when the name is taken). No listing shows temporary files. Only regular files are objects: links
and pipes are neither listed nor opened.

A local runtime gives each session its own folder in place of the store's (`SessionFolder`), so that no session reads the
records of others. Its objects belong to the store for every reader outside, and are moved there when the session has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import ConfigError, ObjectExistsError, ObjectNotFoundError, StoreError, StorePermissionError
from .base import ObjectInfo, ObjectStore, TransientStoreError, check_key, check_size, utc

T = TypeVar("T")
logger = logging.getLogger(__name__)

# A full or briefly unreachable disk, an exhausted table: a retry may succeed.
_TRANSIENT = {
    *(errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EINTR, errno.EIO, errno.EMFILE),
    *(errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT),
}
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NAME_BYTES = 255  # limit on Linux and macOS
_TEMP = re.compile(r"\.tmp-[0-9a-f]{16}")
_SESSION = ".session-"  # begins the names of sessions' folders


class LocalStore(ObjectStore):
    """``file:///directory``. The first put creates the directory. All file operations run in threads."""

    def __init__(self, url: str, root: str) -> None:
        super().__init__(url)
        self._root = root.rstrip("/")

    def check_writable(self, key: str) -> None:
        """Check a key, and the length of its parts. Raises: ConfigError."""
        check_key(key)
        if max(len(part.encode()) for part in key.split("/")) > _NAME_BYTES:
            raise ConfigError(f"{key[:80]!r}...: a part of a key has at most {_NAME_BYTES} bytes; shorten its id")

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        def write() -> None:
            path = self._path(key)
            _write(path, body, create_only, durable)
            while durable and len(path) > max(1, len(self._root)):  # a new name is on disk when its folders are
                path = os.path.dirname(path)
                _sync_folder(path)

        await self._in_thread(key, write)

    async def _get(self, key: str, max_bytes: int | None) -> bytes:
        def read(path: str) -> bytes:
            with open(os.open(path, _OPEN), "rb") as file:  # a pipe without a writer must not block
                check_size(key, self.url, _regular(os.fstat(file.fileno()), key).st_size, max_bytes)
                return file.read()

        return await self._in_thread(key, lambda: self._find(key, read))

    async def _head(self, key: str) -> ObjectInfo:
        return await self._in_thread(
            key, lambda: self._find(key, lambda path: _info(key, _regular(os.lstat(path), key)))
        )

    async def _list(self, prefix: str) -> list[ObjectInfo]:
        def walk() -> list[ObjectInfo]:
            # An object that is moved meanwhile is found twice rather than not at all.
            folders = [*_session_folders(self._root), self._root]
            found = {
                info.key: info for folder in folders for info in _walk(folder, prefix, strict=folder == self._root)
            }
            return [found[key] for key in sorted(found)]

        return await self._in_thread(prefix, walk)

    async def _delete(self, key: str) -> None:
        def unlink() -> None:
            for folder in (*_session_folders(self._root), self._root):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(f"{folder}/{key}")

        await self._in_thread(key, unlink)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _find(self, key: str, read: Callable[[str], T]) -> T:
        """Read an object in the store, or otherwise in a session's folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return read(self._path(key))
        for folder in _session_folders(self._root):
            with contextlib.suppress(OSError):  # the session may have made anything of it
                return read(f"{folder}/{key}")
        return read(self._path(key))  # it may have been moved meanwhile

    async def _in_thread(self, key: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as e:
            raise self._error(key, e) from e

    def _error(self, key: str, e: OSError) -> StoreError:
        where = f"{key!r} in {self.url}"
        if isinstance(e, FileExistsError):
            return ObjectExistsError(f"{where} exists", key=key)
        if isinstance(e, FileNotFoundError) or e.errno in (errno.ELOOP, errno.ENXIO):
            return ObjectNotFoundError(f"no object {where}", key=key)
        if isinstance(e, PermissionError) or e.errno == errno.EROFS:
            return StorePermissionError(f"no access to {where}: {e}", key=key)
        if e.errno in _TRANSIENT:
            return TransientStoreError(f"{where}: {e}", ambiguous=False, key=key)
        return StoreError(f"{where}: {e}", permanent=True, key=key)


class SessionFolder:
    """The folder that one session has in place of the store in ``root``. ``names`` are the paths of the store."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.path = root, root / f"{_SESSION}{name}"
        self.names = sorted({str(root), os.path.realpath(root)})

    def make(self) -> None:
        """Make it, for the users that may write to the store. Blocks."""
        self.path.mkdir(parents=True, exist_ok=True)
        known = self.root.stat()
        with contextlib.suppress(PermissionError):
            os.chown(self.path, known.st_uid, known.st_gid)
        self.path.chmod(stat.S_IMODE(known.st_mode))

    def merge(self) -> None:
        """Move its objects into the store, where an object of the same key stays, and remove it. Blocks.

        What another user has made and this one cannot move stays, and is read there.
        """
        for info in _walk(str(self.path), "", strict=False):
            target = self.root / info.key
            with contextlib.suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.link(self.path / info.key, target, follow_symlinks=False)
                os.unlink(self.path / info.key)
        if not _walk(str(self.path), "", strict=False):
            try:
                shutil.rmtree(self.path, ignore_errors=True)
            except RecursionError:  # a session may make folders of any depth
                subprocess.run(["rm", "-rf", "--", self.path], stderr=subprocess.DEVNULL, check=False)

    @classmethod
    def merge_all(cls, root: Path, begin: str) -> None:
        """Merge the folders whose names begin like this, those of a runtime that was killed. Blocks."""
        for path in root.glob(f"{_SESSION}{begin}-*"):
            cls(root, path.name.removeprefix(_SESSION)).merge()


def _session_folders(root: str) -> list[str]:
    try:
        return [f"{root}/{name}" for name in os.listdir(root) if name.startswith(_SESSION)]
    except OSError:
        return []


def _write(path: str, body: bytes, create_only: bool, durable: bool) -> None:
    folder = os.path.dirname(path)
    temp = f"{folder}/.tmp-{secrets.token_hex(8)}"
    try:
        try:
            fd = os.open(temp, _CREATE, 0o644)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            fd = os.open(temp, _CREATE, 0o644)
        with open(fd, "wb") as file:
            file.write(body)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if create_only:
            os.link(temp, path)
            os.unlink(temp)
        else:
            os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _walk(root: str, prefix: str, *, strict: bool) -> list[ObjectInfo]:
    """List the objects in a folder whose key starts with `prefix`. No link below `root` is followed.

    Other files are left out, and so are folders below the prefix that cannot be read. ``strict``: the first one must be readable.
    """
    top = prefix.rpartition("/")[0]
    if top and not _is_key(top):
        return []  # no object can be there
    start = f"{top}/" if top else ""
    found: list[ObjectInfo] = []
    folders = [start]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(f"{root}/{folder}") as entries:
                for entry in entries:
                    key = folder + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if not folder and entry.name.startswith(_SESSION):
                            continue
                        if f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
                            folders.append(f"{key}/")
                    elif (
                        key.startswith(prefix)
                        and entry.is_file(follow_symlinks=False)
                        and not _TEMP.fullmatch(entry.name)
                        and _is_key(key)
                    ):
                        with contextlib.suppress(FileNotFoundError):  # it was deleted since
                            found.append(_info(key, entry.stat(follow_symlinks=False)))
        except OSError as e:
            if e.errno in _TRANSIENT or (strict and folder == start and isinstance(e, PermissionError)):
                raise
            logger.debug("%s/%s is left out of a listing: %s", root, folder, e)
    return found


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except ConfigError:
        return False
    return True


def _regular(found: os.stat_result, key: str) -> os.stat_result:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(f"{key}: not a regular file")
    return found


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _info(key: str, of: os.stat_result) -> ObjectInfo:
    etag = f'"{of.st_mtime_ns:x}-{of.st_size:x}-{of.st_ino:x}"'
    return ObjectInfo(key=key, size=of.st_size, last_modified=utc(of.st_mtime), etag=etag)
