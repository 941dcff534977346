"""Reading a directory that others write to: only regular files are objects, no link is followed, nothing there blocks a reader.

Theory of operation. Every step down goes from an open folder to a name in it (``openat`` with ``O_NOFOLLOW``), never along a
path: no symbolic link below the store's own directory is followed, wherever it stands and whenever it is put there, and no path
can be too long. A listing walks with a stack of its own, so a deep tree costs no recursion; it leaves out what is no object and
reports it. An object is looked at before it is opened, opened without blocking, and looked at again: a FIFO, a device or a socket
under a key is no object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..errors import ConfigError, UnlistableError
from .base import MAX_KEY_BYTES, check_key
from .names import TEMP_PREFIX, path_of, text_of

MAX_DEPTH = 64  # folders below the store's directory; keys of rollouts have three to six parts
MAX_NAMES = 1_000_000  # of one listing: some 8 s and 500 MB
_CHUNK = 2**20

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # needs no right to list
_ROOT = _STEP & ~os.O_NOFOLLOW  # the store's own directory is its owner's word and may be a link
_OBJECT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = {errno.ENOENT, errno.ENOTDIR}
_OURS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EINTR,
    errno.EAGAIN,
}  # trouble of this process, not of the folder

Skip = Callable[[str, str], None]  # (kind, name)


@contextlib.contextmanager
def opened(root: str, key: str) -> Iterator[int]:
    """The file of an object, open for reading. Raises: FileNotFoundError where there is none; OSError."""
    with _folder_of(root, key) as (folder, name):
        _regular(os.stat(name, dir_fd=folder, follow_symlinks=False), key)
        try:
            fd = os.open(name, _OBJECT, dir_fd=folder)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):  # became a link or a socket since
                raise FileNotFoundError(key) from e
            raise
    try:
        _regular(os.fstat(fd), key)
        yield fd
    finally:
        os.close(fd)


def read_all(fd: int, max_bytes: int | None) -> bytes:
    """What is in the file, but no more than one byte above the limit, however fast it grows."""
    pieces = []
    left = None if max_bytes is None else max_bytes + 1
    while left is None or left > 0:
        piece = os.read(fd, _CHUNK if left is None else min(_CHUNK, left))
        if not piece:
            break
        pieces.append(piece)
        if left is not None:
            left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def stat_object(root: str, key: str) -> os.stat_result:
    """Size and age of an object. Raises: FileNotFoundError where there is none; OSError."""
    with _folder_of(root, key) as (folder, name):
        return _regular(os.stat(name, dir_fd=folder, follow_symlinks=False), key)


def list_objects(root: str, prefix: str, after: str | None, skip: Skip) -> list[tuple[str, os.stat_result]]:
    """The objects whose key starts with `prefix` and sorts behind `after`, in no order. ``skip`` gets what is left out.

    Raises: UnlistableError above `MAX_NAMES`; OSError where the folder of the prefix itself cannot be read.
    """
    top = prefix.rpartition("/")[0]
    if top and not _is_key(top):
        return []  # no object can be there
    parts = path_of(top).split("/") if top else []
    found: list[tuple[str, os.stat_result]] = []
    names = 0
    stack: list[_Folder] = []

    def visit(fd: int, base: str, path: str) -> None:
        nonlocal names
        below: list[tuple[str, str]] = []
        stack.append(_Folder(fd, path, below))
        plain = base == path  # no name above is an escaped one
        with os.scandir(fd) as entries:
            for entry in entries:
                names += 1
                if names > MAX_NAMES:
                    raise UnlistableError(f"more than {MAX_NAMES} names under {prefix!r} in {root}", key=prefix)
                if entry.name.startswith(TEMP_PREFIX):
                    continue
                text, goes_on = text_of(entry.name) or (entry.name, True)
                key = base + text
                try:
                    if entry.is_dir(follow_symlinks=False):
                        key = key if goes_on else key + "/"
                        if _wanted(key, prefix, after):
                            below.append((entry.name, key))
                    elif key.startswith(prefix) and (after is None or key > after):
                        why = _no_object(entry, key, path + entry.name, plain)
                        if why is not None:
                            skip(why, key)
                        else:
                            found.append((key, entry.stat(follow_symlinks=False)))
                except OSError as e:
                    if e.errno in _OURS:
                        raise
                    if e.errno not in _GONE:  # deleted since the scan
                        skip(f"a file that cannot be read: {os.strerror(e.errno or 0)}", key)

    try:
        fd = _open_top(root, parts)
        if fd is None:
            return []
        base = f"{top}/" if top else ""
        visit(fd, base, path_of(top) + "/" if top else "")
        while stack:
            folder = stack[-1]
            if not folder.below:
                os.close(folder.fd)
                stack.pop()
                continue
            name, key = folder.below.pop()
            if len(parts) + len(stack) > MAX_DEPTH:
                skip(f"a folder more than {MAX_DEPTH} levels deep", key)
                continue
            depth = len(stack)
            try:
                visit(os.open(name, _FOLDER, dir_fd=folder.fd), key, f"{folder.path}{name}/")
            except OSError as e:
                if e.errno in _OURS:
                    raise
                if (
                    len(stack) > depth
                ):  # it broke off in the middle: what was seen of it counts, what lies below does not
                    stack[-1].below.clear()
                if e.errno not in _GONE:
                    skip(f"a folder that cannot be read: {os.strerror(e.errno or 0)}", key)
        return found
    finally:
        for folder in stack:
            os.close(folder.fd)


class _Folder(NamedTuple):
    """An open folder. ``path``: within the store, with the final slash. ``below``: name and key of each folder still to visit."""

    fd: int
    path: str
    below: list[tuple[str, str]]


def _no_object(entry: os.DirEntry[str], key: str, path: str, plain: bool) -> str | None:
    """Why this entry, no folder, is no object; None when it is one."""
    name = entry.name
    if not entry.is_file(follow_symlinks=False):
        return "a link" if entry.is_symlink() else "not a regular file"
    if plain and name.isascii() and name.isprintable() and "%" not in name and len(key) <= MAX_KEY_BYTES // 4:
        return None  # nearly all of them: nothing in it is escaped or may need to be
    if not _is_key(key) or path_of(key) != path:
        return "a name that no key has"
    return None


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except ConfigError:
        return False
    return True


def _wanted(folder: str, prefix: str, after: str | None) -> bool:
    """Whether keys in this folder (with its final slash) can start with the prefix and sort behind `after`."""
    if after is not None and folder < after and not after.startswith(folder):
        return False
    return folder.startswith(prefix) or prefix.startswith(folder)


def _open_top(root: str, parts: list[str]) -> int | None:
    """The folder of a prefix; None when there is none, or a link stands in the way."""
    fd = None
    try:
        fd = os.open(root, _ROOT)
        for part in parts:
            fd = _down(fd, part, _STEP)
        return _down(fd, ".", _FOLDER)
    except OSError as e:
        if e.errno in (*_GONE, errno.ELOOP):
            return None
        raise


def _down(fd: int, name: str, flags: int) -> int:
    """A folder within a folder, which is closed."""
    try:
        return os.open(name, flags, dir_fd=fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _folder_of(root: str, key: str) -> Iterator[tuple[int, str]]:
    """The folder that an object lies in, and its name there. Raises: FileNotFoundError, OSError."""
    *parts, name = path_of(key).split("/")
    try:
        fd = os.open(root, _ROOT)
        for part in parts:
            fd = _down(fd, part, _STEP)
    except OSError as e:
        if e.errno in (*_GONE, errno.ELOOP):
            raise FileNotFoundError(key) from e
        raise
    try:
        yield fd, name
    finally:
        os.close(fd)


def _regular(found: os.stat_result, key: str) -> os.stat_result:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(f"{key}: not a regular file")
    return found
