"""Configuration of a local runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .api.faults import FaultPlan
from .api.quotas import PROFILES, QuotaProfile

# The variables of the runtime that sessions inherit.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """The parts of this machine that sessions may use.

    ``tier``: auto (process where Bubblewrap is, else none), process, none or container. ``readable`` and ``writable``: paths
    that sessions may use besides their own folder and the agent's project. ``hidden``: paths in these that sessions cannot read;
    a runtime that serves adds more. ``store``: the folder of the ``file://`` store that they
    write their records to. ``copied``: paths of the agent's project that are copied for each session, if it has no view of the
    project. ``memory_bytes``: the limit of each process of a session, in a container that of the session;
    None: no limit.
    ``container_runtime``: Docker's runtime for containers, such as runsc. None: its default.
    """

    tier: Literal["auto", "process", "none", "container"] = "auto"
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    copied: tuple[Path, ...] = ()
    hidden: set[Path] = field(default_factory=set)
    store: Path | None = None
    memory_bytes: int | None = None
    container_runtime: str | None = None

    @property
    def writable_folders(self) -> tuple[Path, ...]:
        """The folders that sessions may write to: the named ones and the store."""
        return self.writable if self.store is None else (*self.writable, self.store)


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Limits of time. Units: seconds.

    ``idle_timeout_s`` and ``max_lifetime_s`` are AWS's defaults for an agent without a lifecycle setting.
    ``init_timeout_s`` is the platform's limit for the first healthy /ping (30 s on V1, 120 s on V2). ``stop_grace_s`` is the
    time between SIGTERM and SIGKILL of a stopped session; ``shutdown_grace_s`` the same when the whole runtime ends.
    """

    init_timeout_s: float = 30.0
    idle_timeout_s: float = 900.0
    max_lifetime_s: float = 28_800.0
    stop_grace_s: float = 60.0
    shutdown_grace_s: float = 5.0
    invoke_timeout_s: float = 900.0
    stream_timeout_s: float = 3_600.0


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """All settings of a local runtime.

    ``credentials``: access key -> secret. Requests must be signed with one of these keys. Empty: the runtime makes a key at its
    start, or takes unsigned requests if ``callers`` is any.
    ``parallel_starts``: more sessions than this wait before they start. Their init timeout counts from then.
    """

    region: str = "us-west-2"
    account_id: str = "123456789012"
    state_dir: Path | None = None
    session_env: Mapping[str, str] = field(default_factory=dict)
    start_mode: Literal["auto", "exec"] = "auto"
    times: TimeLimits = field(default_factory=TimeLimits)
    quotas: QuotaProfile = PROFILES["unlimited"]
    faults: FaultPlan = field(default_factory=FaultPlan)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    callers: Literal["user", "any"] = "user"
    parallel_starts: int = field(default_factory=lambda: max(4, 2 * (os.cpu_count() or 1)))
