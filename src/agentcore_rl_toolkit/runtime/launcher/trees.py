"""Remove and measure folders that somebody else has filled, whatever is in them. Standard library only, Python 3.10.

A session may nest 100,000 folders, take every permission from them, and name them so that no path reaches the lowest one.
So nothing here recurses, follows a link, or uses a path of more than one name below the folder it was given: each step opens
one name relative to a folder that is open already.

Removing takes a tree apart from its top: the folders in a folder are moved up beside it, which makes any tree flat with two
open folders. Measuring must leave a live session's folders where they are. It holds the lowest `_HELD` folders of its way
open and finds the others again through `..`, each of which has to be the folder it came by.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NAME = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER = stat.S_IRWXU
_HELD = 64  # open folders of one walk
_WAITING = 10_000  # names of folders kept in memory; what is beyond is found by the next pass
ENTRY_BYTES = 512  # what an entry takes at least: an empty file has no blocks, and is not free
REMOVE_S = 600.0


def remove(
    path: str | os.PathLike[str], *, within_s: float = REMOVE_S, stop: Callable[[], bool] | None = None
) -> str | None:
    """Remove a folder and all that is in it; anything else by that name, too. What is not there is no error.

    Returns: None, or why something is left of it: a file that its owner made immutable, a mount, ``within_s`` seconds are over
    or ``stop`` returned true.
    """
    try:
        top = _open(os.fspath(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:  # a link among others
        return _reason(os.unlink, path)
    except OSError as e:
        return _reason(os.unlink, path) if e.errno == errno.ELOOP else _description(e, path)
    try:
        why = _Removal(top, time.monotonic() + within_s, stop).empty()
    finally:
        os.close(top)
    return why or _reason(os.rmdir, path)


def _reason(call: object, path: object) -> str | None:
    try:
        call(path)  # type: ignore[operator]
    except FileNotFoundError:
        return None
    except OSError as e:
        return _description(e, path)
    return None


def _description(error: OSError, name: object) -> str:
    return f"{os.fsdecode(name)[-200:]!r}: {error.strerror}"  # type: ignore[arg-type]


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file that is one: not a link to one, nor a pipe, which would be waited for. Raises: OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))


class _Removal:
    """Empties one open folder."""

    def __init__(self, top: int, until_s: float, stop: Callable[[], bool] | None) -> None:
        self._top, self._until_s, self._stop = top, until_s, stop
        self._prefix = f".{os.urandom(8).hex()}-"  # of folders that were moved up
        self._moved = 0
        self._done = 0  # things removed or moved: a pass without any is the last one
        self._why: str | None = None

    def empty(self) -> str | None:
        """Returns: why something is left, or None."""
        while True:
            before = self._done
            self._pass()
            if self._over():
                return self._why or "there was more than could be removed in the time given"
            if self._done == before:
                return self._why

    def _pass(self) -> None:
        self._why = None
        for name in self._clear(self._top, move=False):
            self._take_apart(name)

    def _over(self) -> bool:
        return time.monotonic() > self._until_s or (self._stop is not None and self._stop())

    def _take_apart(self, name: str) -> None:
        waiting = [name]
        while waiting and not self._over():
            name = waiting.pop()
            try:
                folder = _open(name, self._top)
            except OSError as e:
                self._fail(e, name)
                continue
            try:
                moved = self._clear(folder, move=True)
            finally:
                os.close(folder)
            waiting += moved[: max(0, _WAITING - len(waiting))]
            self._try(os.rmdir, name, self._top)

    def _clear(self, folder: int, *, move: bool) -> list[str]:
        """Remove what is in a folder but its folders, which are moved up or stay. Returns: names of theirs at the top."""
        names: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._over():
                        break
                    if not entry.is_dir(follow_symlinks=False):
                        self._try(os.unlink, entry.name, folder)
                    elif not self._try(os.rmdir, entry.name, folder, quiet=True):
                        name = self._move_up(entry.name, folder) if move else entry.name
                        if name is not None and len(names) < _WAITING:
                            names.append(name)
        except OSError as e:
            self._fail(e, "a folder")
        return names

    def _move_up(self, name: str, folder: int) -> str | None:
        self._moved += 1
        new = f"{self._prefix}{self._moved}"
        try:
            try:
                os.rename(name, new, src_dir_fd=folder, dst_dir_fd=self._top)
            except PermissionError:  # a folder that moves has its ".." rewritten
                _open_up(name, folder)
                os.rename(name, new, src_dir_fd=folder, dst_dir_fd=self._top)
        except OSError as e:
            self._fail(e, name)
            return None
        self._done += 1
        return new

    def _try(self, call: object, name: str, folder: int, *, quiet: bool = False) -> bool:
        try:
            call(name, dir_fd=folder)  # type: ignore[operator]
        except FileNotFoundError:
            return True
        except OSError as e:
            if not quiet:
                self._fail(e, name)
            return False
        self._done += 1
        return True

    def _fail(self, error: OSError, name: str) -> None:
        if self._why is None and error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            self._why = _description(error, name)


@dataclass(frozen=True)
class Usage:
    """Disk that a folder takes, in bytes, and how many folders in it could not be looked into."""

    bytes: int
    missed: int = 0


@dataclass
class _Level:
    """One folder on the way down: its descriptor while it is held, and the folders in it that are still to be visited."""

    fd: int | None
    identity: tuple[int, int]
    mode: int | None = None  # what it was before we opened it up
    names: list[str] = field(default_factory=list)


def measure(path: str | os.PathLike[str], *, most: int | None = None) -> Usage:
    """The disk that what is in a folder takes, links not followed. What comes and goes meanwhile is no error.

    Above ``most`` bytes it stops counting. Every entry counts as `ENTRY_BYTES` at least.
    """
    walk = _Walk(most)
    try:
        walk.run(path)
    finally:
        walk.close()
    return Usage(walk.total, walk.missed)


class _Walk:
    def __init__(self, most: int | None) -> None:
        self.total = self.missed = 0
        self._most = most
        self._way: list[_Level] = []
        self._waiting = 0  # names on all levels

    def run(self, path: str | os.PathLike[str]) -> None:
        try:
            top = _open(os.fspath(path), change=False)
        except OSError:
            return
        self._enter(top, None)
        while self._waiting and (self._most is None or self.total <= self._most):
            level = self._way[-1]
            if level.names:
                self._waiting -= 1
                self._descend(level, level.names.pop())
            else:
                self._ascend()

    def _descend(self, level: _Level, name: str) -> None:
        assert level.fd is not None
        mode: int | None = None
        try:
            try:
                fd = _open(name, level.fd, change=False)
            except PermissionError:
                mode = _open_up(name, level.fd)
                fd = _open(name, level.fd, change=False)
        except OSError as e:
            self.missed += e.errno in (errno.EACCES, errno.EPERM)
            return
        self._enter(fd, mode)

    def _enter(self, fd: int, mode: int | None) -> None:
        found = os.fstat(fd)
        level = _Level(fd, (found.st_dev, found.st_ino), mode)
        self._way.append(level)
        far = len(self._way) - 1 - _HELD
        if far > 0:  # the top one stays
            self._let_go(self._way[far], restore=False)  # on the way back it has to be opened once more
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except PermissionError:  # a folder that can be listed and not searched
                        level.mode = stat.S_IMODE(found.st_mode) if level.mode is None else level.mode
                        os.fchmod(fd, _OWNER)
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    self.total += max(info.st_blocks * 512, ENTRY_BYTES)
                    if stat.S_ISDIR(info.st_mode):
                        level.names.append(entry.name)
                    if self._most is not None and self.total > self._most:
                        break
        except OSError as e:
            self.missed += e.errno in (errno.EACCES, errno.EPERM)
        self._waiting += len(level.names)

    def _ascend(self) -> None:
        level = self._way.pop()
        above = self._way[-1]
        if above.fd is None:
            try:
                above.fd = _open("..", level.fd, change=False)
                found = os.fstat(above.fd)
                same = (found.st_dev, found.st_ino) == above.identity
            except OSError:
                same = False
            if not same:  # something on the way has been moved: what is left of it is counted next time
                self.missed += 1
                while len(self._way) > 1:
                    gone = self._way.pop()
                    self._waiting -= len(gone.names)
                    self._let_go(gone)
        self._let_go(level)

    def _let_go(self, level: _Level, *, restore: bool = True) -> None:
        if level.fd is not None:
            if restore and level.mode is not None:
                with contextlib.suppress(OSError):
                    os.fchmod(level.fd, level.mode)
            os.close(level.fd)
            level.fd = None

    def close(self) -> None:
        opened_up = [place for place, level in enumerate(self._way) if level.fd is None and level.mode is not None]
        while opened_up and len(self._way) > opened_up[0] + 1:
            self._ascend()
        for level in self._way:
            self._let_go(level)


def _open(name: str, folder: int | None = None, *, change: bool = True) -> int:
    """Open a folder; with ``change``, one that its owner may read, search and write."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=folder)
    except PermissionError:
        if not change:
            raise
        _open_up(name, folder)
        return os.open(name, _FOLDER, dir_fd=folder)
    if change and os.fstat(fd).st_mode & _OWNER != _OWNER:
        with contextlib.suppress(OSError):
            os.fchmod(fd, _OWNER)
    return fd


def _open_up(name: str, folder: int | None) -> int:
    """Let its owner, which is us, into a folder. Returns: the mode it had. Raises: OSError where it is not ours."""
    if not hasattr(os, "O_PATH"):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        os.chmod(name, _OWNER, dir_fd=folder, follow_symlinks=False)
        return stat.S_IMODE(mode)
    fd = os.open(name, _NAME, dir_fd=folder)  # which takes no permission, and cannot be exchanged for a link any more
    try:
        mode = os.fstat(fd).st_mode
        os.chmod(f"/proc/self/fd/{fd}", _OWNER)
    finally:
        os.close(fd)
    return stat.S_IMODE(mode)
