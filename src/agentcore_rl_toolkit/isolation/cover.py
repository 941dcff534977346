"""Hides answers and keys from sessions: data, folders of runs, keys, `.env*`, `.git`.

Theory of operation. A mount over a file ends when another file takes its name outside, and it does not cover new files. Therefore a
folder with a hidden entry is replaced with a listing: an empty file or folder for each entry, over which the entries that are not
hidden are mounted. A name that is added to the folder later does not exist in the session. The folders in which commands and users
write (the project's, the agent's, the current one) are always listed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

RUN_FILES = {"ledger.jsonl", "rollouts.sqlite"}
MANY = 500  # entries, each a mount of 1 to 2 ms; a larger folder is shown as it is, and only its hidden entries are empty


class Cover:
    """The mounts that hide files from sessions.

    Args:
        project: the folder in which `private_files` looks for more to hide.
        shown, writable: what sessions see. Such a path stays visible, also if it is hidden or lies in a hidden folder.
        hidden: files and folders.
        listed: folders whose new entries do not appear in sessions.
        folder: a new folder for the listings.
    """

    def __init__(
        self,
        script: Path,
        project: Path,
        *,
        shown: Sequence[Path],
        writable: Sequence[Path],
        hidden: Iterable[Path],
        listed: Iterable[Path],
        folder: Path,
    ) -> None:
        self.mounts: dict[str, str] = {}  # a path in the session -> its source
        self._folder = folder
        self._shown = {name: os.path.realpath(name) for path in (*shown, *writable) for name in (str(path), _real(path))}
        self._writable = [_real(path) for path in writable]
        named = {name for path in hidden for name in (os.path.join(_real(path.parent), path.name), _real(path))}
        stats = [os.stat(path) for path in named if os.path.isfile(path)]
        found = private_files(Path(_real(project)), {(s.st_dev, s.st_ino) for s in stats if s.st_nlink > 1})
        named |= {name for path in found for name in (str(path), _real(path))}
        tops = {*self._shown.values()}
        self._hidden = {path for path in named - tops if _in(path, tops) and not _below(_real(script), path)}
        self._empty: dict[str, str] = {}  # a hidden path -> the empty file or folder in its place
        self._listed: dict[str, set[str]] = {}  # a listed folder -> the names in it that are shown
        for place in sorted({*map(os.path.dirname, self._hidden), *map(_real, listed)}):
            if _in(place, tops) and os.path.isdir(place) and not _in(place, self._hidden):
                self._list(place)
        for path in tops:
            self.make_mount_point(path)

    def make_mount_point(self, path: str) -> None:
        """Make the place of a mount inside a hidden folder."""
        for hidden, empty in self._empty.items():
            if path != hidden and _below(path, hidden):
                _make(empty + path[len(hidden) :], folder=os.path.isdir(path))

    def shows(self, path: Path) -> bool:
        """Return True if sessions can read this file or folder."""
        real = _real(path)
        if not _in(real, self._shown.values()) or _in(real, self._hidden):
            return False
        inner = ((real[len(folder) + 1 :], names) for folder, names in self._listed.items() if _below(real, folder))
        return all(rest.partition("/")[0] in names for rest, names in inner)

    def _list(self, real: str) -> None:
        """Replace a folder with its listing."""
        places = {name + real[len(top) :] for name, top in self._shown.items() if _below(real, top)}
        entries = list(os.scandir(real))
        as_it_is = len(entries) > MANY or _in(real, self._writable)
        listing = self._folder / str(len(os.listdir(self._folder)))
        listing.mkdir()
        if not as_it_is:
            self.mounts |= dict.fromkeys(places, str(listing))
            self._listed[real] = {"", *(entry.name for entry in entries if entry.path not in self._hidden)}
        for entry in entries:
            hidden, copy = entry.path in self._hidden, str(listing / entry.name)
            if as_it_is and (not hidden or entry.is_symlink()):
                continue
            if entry.is_symlink() and not hidden:
                os.symlink(os.readlink(entry.path), copy)
                continue
            _make(copy, folder=entry.is_dir())
            if hidden:
                self._empty[entry.path] = copy
            if hidden == as_it_is:
                mounted = {f"{place}/{entry.name}" for place in places} - self._shown.keys()
                self.mounts |= dict.fromkeys(mounted, copy if hidden else entry.path)


def private_files(project: Path, linked: Collection[tuple[int, int]] = ()) -> Iterator[Path]:
    """Find keys, `.env` files, `.git`, folders of runs, and other names of the ``linked`` inodes. Blocks."""
    for base, folders, files in os.walk(project):
        inner = []
        for name in folders:
            path = Path(base, name)
            is_run = any(map(os.path.exists, (path / file for file in RUN_FILES)))
            if is_run or name in (".git", ".agentcore-rl") or name.startswith(".env"):
                yield path
            elif name == "runs" and not any(path.glob("*.py")):  # else a package of this name
                yield path
            elif name != "node_modules" and not os.path.exists(path / "pyvenv.cfg"):
                inner.append(name)
        folders[:] = inner
        for name in files:
            path = Path(base, name)
            if name == ".git" or name.startswith(".env") or name.endswith(".key"):
                yield path
            elif linked and os.path.exists(path) and (path.stat().st_dev, path.stat().st_ino) in linked:
                yield path


def _make(path: str, *, folder: bool) -> None:
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        open(path, "a").close()


def _real(path: Path | str) -> str:
    return os.path.realpath(path)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _in(path: str, folders: Iterable[str]) -> bool:
    return any(_below(path, folder) for folder in folders)
