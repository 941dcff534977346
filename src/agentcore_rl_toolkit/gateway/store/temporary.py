"""Folders of gateways that were given no store, and what is left of those whose process was killed.

A gateway takes its folder away when it stops; a killed one cannot, and such folders hold every call it recorded. The next
gateway that makes a folder removes those that nobody can want back: of this user, with nothing in them but a store, not
touched for a day, and with a journal whose lock is free. Whoever removes one holds its lock until the end, so another
that starts at the same time, or somebody who takes the folder as his store, is kept out. Everything is opened from its
parent's descriptor and never through a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "agentcore-rl-gateway-"
UNTOUCHED_S = 24 * 3600.0
_SWEEP_S = 5.0  # a start does not wait longer; what is left then is for the next one

_LOCK = "lock"
_FILE = re.compile(r"lock|secret|tokenizer\.(json|new)|calls-\d{8}\.log")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make() -> str:
    """A new folder for a store that is to be gone with its process."""
    sweep(Path(tempfile.gettempdir()))
    return tempfile.mkdtemp(prefix=PREFIX)


def sweep(parent: Path) -> list[str]:
    """Remove what killed gateways left in `parent`; returns the names of the folders."""
    gone: list[str] = []
    give_up_s = time.monotonic() + _SWEEP_S
    with ExitStack() as opened, contextlib.suppress(OSError):
        above = _directory(opened, str(parent), None, follow=True)
        for name in sorted(n for n in os.listdir(above) if n.startswith(PREFIX)):
            if time.monotonic() > give_up_s:
                log.warning("more stores of killed gateways are left in %s; later starts remove them", parent)
                break
            try:
                if _remove(above, name):
                    gone.append(name)
            except OSError as e:  # somebody else removes it as well, or may not be disturbed
                log.debug("%s stays: %s", name, e)
    if gone:
        log.info("removed the stores of %d killed gateways from %s", len(gone), parent)
    return gone


def _remove(above: int, name: str) -> bool:
    """Whether a folder was a store that nobody has or wants, and is gone. Raises: OSError."""
    with ExitStack() as opened:
        folder = _directory(opened, name, above)
        if not _hold(opened, folder) or not _left_alone(folder, time.time() - UNTOUCHED_S):
            return False
        _empty(folder)
        os.rmdir(name, dir_fd=above)
        return True


def _directory(opened: ExitStack, name: str, above: int | None, *, follow: bool = False) -> int:
    """Open a directory; not through a link, unless `follow`."""
    fd = os.open(name, _DIRECTORY & ~os.O_NOFOLLOW if follow else _DIRECTORY, dir_fd=above)
    opened.callback(os.close, fd)
    return fd


def _hold(opened: ExitStack, store: int) -> bool:
    """Take the lock of the journal in a folder, if there is one; without one there may be no calls either.

    Raises: OSError when a gateway has it.
    """
    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=store)
    except FileNotFoundError:
        return not any(name.startswith("calls-") for name in os.listdir(store))
    opened.callback(os.close, fd)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _left_alone(store: int, limit_s: float) -> bool:
    """Whether a folder is ours, is a store and nothing else, and has not been touched since."""
    names = os.listdir(store)
    about = [os.fstat(store), *(os.stat(name, dir_fd=store, follow_symlinks=False) for name in names)]
    if any(found.st_uid != os.geteuid() or found.st_mtime > limit_s for found in about):
        return False
    return all(
        _FILE.fullmatch(name) is not None and stat.S_ISREG(found.st_mode)
        for name, found in zip(names, about[1:], strict=True)
    )


def _empty(store: int) -> None:
    """Remove the files, the lock last: who finds calls without one leaves them alone."""
    for name in sorted(filter(_FILE.fullmatch, os.listdir(store)), key=lambda name: name == _LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=store)
