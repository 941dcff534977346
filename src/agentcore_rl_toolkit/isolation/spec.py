"""What one session may see and use, independent of the mechanism that enforces it.

Files are an allow-list in every tier that confines files at all: the system and the interpreter are readable, ``session_dir`` and
``writable`` can be written, everything else is not there (namespaces) or refused (Landlock). Another session's directory is
therefore out of reach without being named.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import ConfigError

Network = Literal["host", "loopback", "none"]
NETWORKS: tuple[Network, ...] = ("host", "loopback", "none")

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store")
# Readable by root even without capabilities, because root owns them.
_SECRETS = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/ssh",
)
_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds for one session; None means no bound.

    Units: bytes; ``cpus`` in cores (0.5 = half of one core), ``processes`` counts threads as well.
    ``file_bytes`` bounds one file, ``tmp_bytes`` the whole private ``/tmp``, and ``/dev/shm`` likewise (namespaces tier).
    """

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None
    file_bytes: int | None = None
    open_files: int | None = None
    tmp_bytes: int | None = (
        2**30
    )  # a session's storage on AgentCore; the kernel's own default would be half of all memory

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"limits.{name} must be positive or None, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class IsolationSpec:
    """One session's confinement.

    ``session_dir`` must exist; it is the session's own, writable, at the same path inside. ``read_only`` is added to
    `system_paths` (or replaces it when ``system`` is given); ``hidden`` is taken out again. ``env`` replaces the environment
    (None leaves it). ``endpoints`` are the ``host:port`` on this machine that a session with ``network="loopback"`` may
    reach, ``relay`` the unix socket of the `Relay` that carries them (namespaces tier). ``image`` is for the container tiers.

    Raises: ConfigError.
    """

    session_dir: Path
    name: str = ""
    cwd: Path | None = None
    read_only: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    system: tuple[Path, ...] | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    network: Network = "host"
    endpoints: tuple[str, ...] = ()
    relay: Path | None = None
    hostname: str = "localhost"
    die_with_parent: bool = True
    image: str | None = None

    def __post_init__(self) -> None:
        for name in ("read_only", "writable", "hidden"):
            object.__setattr__(self, name, tuple(Path(p) for p in getattr(self, name)))
        object.__setattr__(self, "session_dir", Path(self.session_dir))
        if not self.name:
            object.__setattr__(self, "name", self.session_dir.name)
        if "/" in self.name or self.name in (".", ".."):
            raise ConfigError(f"isolation name {self.name!r} must not contain '/'")
        for path in (self.session_dir, *self.read_only, *self.writable, *self.hidden, *(self.system or ())):
            if not path.is_absolute():
                raise ConfigError(f"isolation paths must be absolute, got {str(path)!r}")
        if self.network not in NETWORKS:
            raise ConfigError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")
        for endpoint in self.endpoints:
            parse_endpoint(endpoint)

    @property
    def readable_paths(self) -> tuple[Path, ...]:
        """Everything visible read-only: the system, the interpreter, and ``read_only``."""
        base = system_paths() if self.system is None else self.system
        return _unique((*base, *self.read_only))

    @property
    def writable_paths(self) -> tuple[Path, ...]:
        return _unique((self.session_dir, *self.writable))

    @property
    def hidden_paths(self) -> tuple[Path, ...]:
        """``hidden``, the folder that holds the session folders, and the system's own secrets that this user could read.

        Where rules meet, the more specific path wins.
        Raises: ConfigError when that folder is itself to be readable: other sessions would be, too.
        """
        folder = self.session_dir.parent
        if folder in self.readable_paths:
            raise ConfigError(
                f"{folder} is readable and holds session directories; put those into a folder of their own"
            )
        return _unique((*self.hidden, folder, *_readable_secrets(os.geteuid())))


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``host:port``. Raises: ConfigError when it is not an address of this machine's loopback."""
    host, _, port = endpoint.rpartition(":")
    if host not in _LOOPBACK_HOSTS or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"endpoint {endpoint!r} must be 127.0.0.1:PORT or localhost:PORT; sessions that need other hosts take network='host'"
        )
    return "127.0.0.1", int(port)


def system_paths() -> tuple[Path, ...]:
    """What programs need to run: system directories, this interpreter, its import path and the resolver's file.

    Places that everybody writes to are left out even when they are on the import path.
    """
    return _system_paths((sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path), os.environ.get("TMPDIR", "/tmp"))


@functools.lru_cache(maxsize=8)  # asked for by every session of a template
def _system_paths(interpreter: tuple[str, ...], temporary: str) -> tuple[Path, ...]:
    shared = {"/", "/tmp", "/var/tmp", "/home", os.path.expanduser("~"), temporary}
    candidates = [*_SYSTEM, *interpreter]
    resolver = os.path.realpath("/etc/resolv.conf")
    if os.path.dirname(resolver) != "/etc":
        candidates.append(resolver)
    return _unique(Path(p) for p in candidates if p not in shared and os.path.isabs(p) and os.path.lexists(p))


@functools.lru_cache(maxsize=8)
def _readable_secrets(user: int) -> tuple[Path, ...]:
    return tuple(Path(p) for p in _SECRETS if os.access(p, os.R_OK))


def _unique(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(paths))
