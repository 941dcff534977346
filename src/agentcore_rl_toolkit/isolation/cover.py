"""Hides answers and keys from sessions: data, folders of runs, keys, `.env*`, `.git`.

Theory of operation. A mount over a file ends when another file takes its name outside, and it does not cover new files. Therefore
a folder with a hidden file in it, at any depth, is replaced with a listing: an empty file or folder for each entry, over which
the entries that are not hidden are mounted. A name that is added to the folder later does not exist in the session. The folders
in which commands and users write (the project's, the agent's, the current one) are always listed.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from os.path import realpath
from pathlib import Path

from .sandbox import SYSTEM, project_of

log = logging.getLogger(__name__)

RUN_FILES = ("ledger.jsonl", "rollouts.sqlite")
PRIVATE = (".git", ".netrc", ".git-credentials", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
# Mounts, each of 1 to 2 ms. Further folders are shown as they are, and only their hidden entries are empty.
MANY = 500


class Cover:
    """The mounts that hide files from an agent's sessions. Blocks.

    Sessions see ``readable`` and ``writable``. Such a path stays visible if it is hidden itself, or lies in a hidden folder.
    `private_files` finds more to hide in the project and in what is readable, except the system, interpreters and packages.
    Listings lie below ``root``.
    """

    def __init__(
        self, script: Path, readable: Sequence[Path], writable: Sequence[Path], hidden: Iterable[Path], *, root: Path
    ) -> None:
        self.mounts: dict[str, str] = {}  # a path in the session -> its source
        self._folder = Path(tempfile.mkdtemp(prefix="listings-", dir=root))
        self._shown = {name: realpath(path) for path in (*readable, *writable) for name in (str(path), realpath(path))}
        self._writable = {name for path in writable for name in (str(path), realpath(path))}
        tops = {*self._shown.values()}
        named = {
            name for path in tuple(hidden) for name in (os.path.join(realpath(path.parent), path.name), realpath(path))
        }
        linked = {(s.st_dev, s.st_ino) for s in map(os.stat, filter(os.path.isfile, named)) if s.st_nlink > 1}
        packages = (top for top in tops if "site-packages" in top.split("/"))
        programs = [*SYSTEM, *packages, *(top for top in tops if glob.glob(f"{glob.escape(top)}/bin/python*"))]
        searched = {path for path in map(realpath, readable) if not _in(path, programs)} | {
            realpath(project_of(script))
        }
        for top in searched:
            named |= {name for path in private_files(top, linked) for name in (str(path), realpath(path))}
        self._hidden = {path for path in named - tops if _in(path, tops) and not _in(realpath(script), [path])}
        self._empty: dict[str, str] = {}  # a hidden path -> the empty file or folder in its place
        above = {str(folder) for path in self._hidden for folder in Path(path).parents}
        for place in sorted(above | set(map(realpath, _always_listed(script)))):
            if _in(place, tops) and os.path.isdir(place) and not _in(place, self._hidden):
                self._list(place)
        for path in tops:
            self.make_mount_point(path)

    def make_mount_point(self, path: str) -> None:
        """Make the place of a mount inside a hidden folder."""
        for hidden, empty in self._empty.items():
            if path != hidden and _in(path, [hidden]):
                _make(empty + path[len(hidden) :], folder=os.path.isdir(path))

    def _list(self, real: str) -> None:
        places = {name + real[len(top) :] for name, top in self._shown.items() if _in(real, [top])}
        entries = list(os.scandir(real))
        as_it_is = _in(real, self._writable)
        if not as_it_is and len(self.mounts) + len(entries) > MANY:
            as_it_is = True
            log.warning(
                "%s has many entries: sessions see its new files, and a hidden file after its replacement", real
            )
        listing = self._folder / str(len(os.listdir(self._folder)))
        listing.mkdir()
        if not as_it_is:
            self.mounts |= dict.fromkeys(places, str(listing))
        for entry in entries:
            hidden, copy = entry.path in self._hidden, str(listing / entry.name)
            if as_it_is and not hidden:
                continue
            if entry.is_symlink() and not hidden:
                with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                    os.symlink(os.readlink(entry.path), copy)
                continue
            _make(copy, folder=entry.is_dir())
            if hidden:
                self._empty[entry.path] = copy
            if hidden == as_it_is and not entry.is_symlink():
                mounted = {f"{place}/{entry.name}" for place in places} - self._writable
                self.mounts |= dict.fromkeys(mounted, copy if hidden else entry.path)


def may_show(paths: Iterable[Path], script: Path, readable: Iterable[Path]) -> bool:
    """Return True if an earlier cover may show one of these paths. New folders of runs are not among them."""
    runs, tops = [folder / "runs" for folder in _always_listed(script)], [project_of(script), *readable]
    return any(_in(str(path), map(str, tops)) and not _in(str(path), map(str, runs)) for path in paths)


def private_files(top: str, linked: Collection[tuple[int, int]] = ()) -> Iterator[Path]:
    """Find keys, `.env` files, `.git`, folders of runs, and all names of the ``linked`` inodes, at any depth. Blocks."""
    pending = [top]
    while pending:  # os.walk is recursive in Python 3.11
        try:
            with os.scandir(pending.pop()) as opened:
                entries = list(opened)
        except OSError:  # it cannot be read, or its path is too long to be read by name
            continue
        for entry in entries:
            name, is_folder = entry.name, entry.is_dir(follow_symlinks=False)
            if is_folder or (entry.is_symlink() and os.path.isdir(entry.path)):
                is_run = any(os.path.exists(f"{entry.path}/{file}") for file in RUN_FILES)
                is_run |= name == "runs" and not any(Path(entry.path).glob("*.py"))  # a package may have it
                if is_run or name in (".git", ".agentcore-rl") or name.startswith(".env"):
                    yield Path(entry.path)
                elif is_folder and name not in ("node_modules", "site-packages"):
                    pending.append(entry.path)
                continue
            is_key = name in PRIVATE or name.endswith((".key", ".env"))
            is_private = is_key or name.startswith((".env", *RUN_FILES))
            if linked and not is_private:
                with contextlib.suppress(OSError):
                    info = os.stat(entry.path)
                    is_private = (info.st_dev, info.st_ino) in linked
            if is_private:
                yield Path(entry.path)


def _always_listed(script: Path) -> tuple[Path, ...]:
    return project_of(script), script.parent, Path.cwd()


def _make(path: str, *, folder: bool) -> None:
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        open(path, "a").close()


def _in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
