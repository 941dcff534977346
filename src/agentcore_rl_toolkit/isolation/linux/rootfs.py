"""The session's own file system view: an empty root into which only the spec's paths are mounted, then the only root there is.

Order matters. Every source is cloned as a detached mount first, while the old tree is still reachable and before a private
``/tmp`` could cover a session directory that lives under ``/tmp``. Then parents are placed before children, links last.
"""

from __future__ import annotations

import functools
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ..spec import IsolationSpec
from . import calls, namespaces

_STAGING = (
    "/tmp",
    "/mnt",
    "/run",
    "/var",
    "/usr",
)  # any existing directory will do; it is covered in this namespace only
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1"}
_LINKS |= {"/dev/stderr": "/proc/self/fd/2", "/dev/ptmx": "pts/ptmx", "/var/tmp": "/tmp"}
# Host-wide switches that uid 0 may write even without capabilities.
_PROC_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
_PROC_MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg")
_TMPFS = calls.MS_NOSUID | calls.MS_NODEV


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What sessions of one template have in common.

    ``mounts``: real path -> writable; ``hidden``: real path -> is a directory.
    """

    mounts: dict[str, bool]
    links: dict[str, str]
    hidden: dict[str, bool]
    devices: tuple[str, ...]
    read_only: tuple[str, ...]
    masked: tuple[str, ...]
    staging: str


def prepare(spec: IsolationSpec) -> None:
    """Work out, in the template, what all its sessions share, so that a session only has to make the mounts."""
    _plan(spec.readable_paths, spec.writable_paths[1:], spec.hidden_paths)


def build(spec: IsolationSpec, *, loader: bool = False) -> None:
    """Give this process (alone in its mount namespace) the view that ``spec`` describes. Raises: OSError.

    ``loader``: the view is one from which further ones can be made. The kernel mounts a new /proc only where an old one shows
    all of itself, so it has no covers; being read-only instead, it makes every later one read-only too.
    """
    plan = _plan(spec.readable_paths, spec.writable_paths[1:], spec.hidden_paths)
    mounts = {**plan.mounts, os.path.realpath(spec.session_dir): True}
    calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)
    clones = {path: _clone(path, writable) for path, writable in mounts.items()}
    devices = {name: _device(name) for name in plan.devices}

    calls.mount("tmpfs", plan.staging, "tmpfs", _TMPFS, "size=1m,mode=755")
    os.chdir(
        plan.staging
    )  # relative targets from here on, so that the new root is meant even where a mount covers a name
    _tmpfs("tmp", spec.limits.tmp_bytes, 0o1777)
    _tmpfs("dev", 1 << 16, 0o755)
    os.mkdir("dev/pts")
    _tmpfs("dev/shm", spec.limits.tmp_bytes, 0o1777)
    for name, fd in devices.items():
        _place(fd, f"dev/{name}", directory=False)
    calls.mount("devpts", "dev/pts", "devpts", calls.MS_NOSUID | calls.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.mkdir("proc")
    read_only_proc = loader or bool(os.statvfs("/proc").f_flag & os.ST_RDONLY)
    flags = _TMPFS | calls.MS_NOEXEC | (calls.MS_RDONLY if read_only_proc and not loader else 0)
    calls.mount("proc", "proc", "proc", flags)
    covers: list[str] = []
    for path in sorted({*clones, *plan.hidden}, key=lambda p: p.count("/")):
        inside = path.lstrip("/")
        if path in plan.hidden:
            shown = path in clones or any(str(above) in clones for above in Path(path).parents)
            if shown and _hide(inside, plan.hidden[path]):
                covers.append(inside)
            if path in clones:
                os.close(clones[path])
        else:
            _place(clones[path], inside, directory=stat.S_ISDIR(os.fstat(clones[path]).st_mode))
    for path in plan.read_only if not read_only_proc else ():
        _over(path, path.lstrip("/"), calls.ATTR_RDONLY)
    for path in plan.masked if not loader else ():
        _over(path, "dev/null", calls.ATTR_RDONLY)
    for path in ("var", "run", "root"):
        os.makedirs(path, exist_ok=True)
    for link, target in plan.links.items():
        _link(link.lstrip("/"), target)
    for inside in covers:
        calls.mount("none", inside, None, _TMPFS | calls.MS_REMOUNT | calls.MS_RDONLY)
    root = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        calls.set_mount_flags(root, calls.ATTR_RDONLY, recursive=False)
    finally:
        os.close(root)
    calls.enter_root(".")
    if loader:
        _lock()


def _lock() -> None:
    writable = calls.clone_mount("/proc")
    try:
        shown = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        try:
            calls.set_mount_flags(shown, calls.ATTR_RDONLY)
        finally:
            os.close(shown)
        namespaces.lock_mounts(writable)
    finally:
        os.close(writable)


@functools.lru_cache(maxsize=32)
def _plan(readable: tuple[Path, ...], writable: tuple[Path, ...], hidden: tuple[Path, ...]) -> _Plan:
    """Paths by what they really are; one beneath another with the same access needs no mount of its own."""
    wanted: dict[str, bool] = {}
    links = dict(_LINKS)
    asked = [(p, False) for p in (*readable, Path("/sys/devices/system"))] + [(p, True) for p in writable]
    for path, may_write in asked:
        real = os.path.realpath(path)
        if not os.path.exists(real) or real == "/":
            continue
        wanted[real] = may_write or wanted.get(real, False)
        if real != str(path):
            links[str(path)] = os.readlink(path) if os.path.islink(path) else real
    mounts: dict[str, bool] = {}
    for real in sorted(wanted, key=lambda p: p.count("/")):
        above = next((str(p) for p in Path(real).parents if str(p) in mounts), None)
        if above is None or mounts[above] != wanted[real]:
            mounts[real] = wanted[real]
    return _Plan(
        mounts=mounts,
        links=links,
        hidden={os.path.realpath(p): os.path.isdir(p) for p in hidden if os.path.lexists(p)},
        devices=tuple(name for name in _DEVICES if os.path.exists(f"/dev/{name}")),
        read_only=tuple(p for p in _PROC_READ_ONLY if os.path.exists(p)),
        masked=tuple(p for p in _PROC_MASKED if os.path.exists(p)),
        staging=next(p for p in _STAGING if os.path.isdir(p)),
    )


def _clone(path: str, writable: bool) -> int:
    fd = calls.clone_mount(path)
    calls.set_mount_flags(fd, calls.ATTR_NOSUID | calls.ATTR_NODEV | (0 if writable else calls.ATTR_RDONLY))
    return fd


def _device(name: str) -> int:
    """A device of the machine. It can be written to; its owner, mode and times are the machine's own and stay as they are."""
    fd = calls.clone_mount(f"/dev/{name}")
    calls.set_mount_flags(fd, calls.ATTR_RDONLY | calls.ATTR_NOSUID | calls.ATTR_NOEXEC)
    return fd


def _tmpfs(target: str, size: int | None, mode: int) -> None:
    os.makedirs(target, exist_ok=True)
    options = f"mode={mode:o}" + (f",size={size}" if size is not None else "")
    calls.mount("tmpfs", target, "tmpfs", _TMPFS, options)


def _place(fd: int, target: str, *, directory: bool) -> None:
    if directory:
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    calls.place_mount(fd, target)


def _over(path: str, source: str, attributes: int) -> None:
    """Mount ``source`` over ``path``, both inside the new root."""
    fd = calls.clone_mount(source, recursive=False)
    calls.set_mount_flags(fd, attributes, recursive=False)
    calls.place_mount(fd, path.lstrip("/"))


def _hide(target: str, is_directory: bool) -> bool:
    """Cover a path, if a mount shows it. Returns: whether the cover is a directory, to be made read-only in the end."""
    if not os.path.lexists(target):
        return False
    if is_directory:
        calls.mount("tmpfs", target, "tmpfs", _TMPFS, "size=64k,mode=755")
    else:
        _over(target, "dev/null", calls.ATTR_RDONLY)
    return is_directory


def _link(link: str, target: str) -> None:
    """Create a link in the new root unless the name is already there, inside one of the mounts."""
    try:
        os.makedirs(os.path.dirname(link) or ".", exist_ok=True)
        if not os.path.lexists(link):
            os.symlink(target, link)
    except OSError as e:
        # Beneath a read-only mount the name either exists as it does outside or was never there.
        if not os.path.lexists(link) and e.errno not in (30,):
            raise
