"""Configuration of a local runtime."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import ConfigError
from .api.faults import FaultPlan
from .api.quotas import PROFILES, QuotaProfile


@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """How sessions are kept apart.

    ``tier``: auto (the strongest one here that can hold ``network``), or namespaces, landlock, process, docker, gvisor.
    ``writable`` and ``read_only``: paths sessions may use besides their own folder and the agent's. ``network``: host,
    loopback (only ``endpoints``, as 127.0.0.1:PORT) or none. Limits are per session; None: no limit. Units: bytes, cores.
    ``disk_bytes`` bounds all files that a session writes, together. ``engine``: auto, docker or podman, for container
    sessions. ``image``: what the docker and gvisor tiers run agents in that are given by path; None: this machine's own
    programs.
    """

    tier: str = "auto"
    writable: tuple[Path, ...] = ()
    read_only: tuple[Path, ...] = ()
    network: Literal["host", "loopback", "none"] = "host"
    endpoints: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None
    file_bytes: int | None = None
    disk_bytes: int | None = None
    engine: Literal["auto", "docker", "podman"] = "auto"
    image: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "cpus", "processes", "file_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value!r}; leave it out for no limit")


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """How long things may take. Units: seconds.

    ``idle_timeout_s`` and ``max_lifetime_s`` are AWS's defaults for an agent that sets no lifecycle of its own.
    ``init_timeout_s`` is the platform's limit for the first healthy /ping (30 s on V1, 120 s on V2). ``stop_grace_s`` is the
    time between SIGTERM and SIGKILL of a stopped session; ``shutdown_grace_s`` the same when the whole runtime ends.
    ``body_timeout_s`` is the longest pause within a request's body.
    """

    init_timeout_s: float = 30.0
    idle_timeout_s: float = 900.0
    max_lifetime_s: float = 28_800.0
    stop_grace_s: float = 60.0
    shutdown_grace_s: float = 5.0
    invoke_timeout_s: float = 900.0
    stream_timeout_s: float = 3_600.0
    body_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_grace_s"):
                if not 0 <= value < math.inf:
                    raise ConfigError(f"{name} must be seconds from 0 up, got {value!r}")
            elif not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0 seconds, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """All settings of a local runtime.

    ``ping_semantics``: docs or observed, see `sessions.activity`. ``credentials``: access key -> secret; when given,
    requests must be signed with one. Without them ``callers`` may invoke, command and stop: this machine's user and root,
    or whoever reaches the port. Sessions may do so with what ``session_calls`` says: their own session, or also those that
    they started.
    ``parallel_starts``: more sessions than this wait before they start; their init timeout counts from then.
    """

    region: str = "us-west-2"
    account_id: str = "123456789012"
    state_dir: Path | None = None
    session_env: Mapping[str, str] = field(default_factory=dict)
    start_mode: Literal["auto", "fork", "exec"] = "auto"
    strict_snapshot: bool = False
    times: TimeLimits = field(default_factory=TimeLimits)
    ping_semantics: Literal["docs", "observed"] = "docs"
    quotas: QuotaProfile = PROFILES["unlimited"]
    faults: FaultPlan = field(default_factory=FaultPlan)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    callers: Literal["user", "any"] = "user"
    session_calls: Literal["own", "started"] = "own"
    kept_logs: int = 2_000
    parallel_starts: int = field(default_factory=lambda: max(4, 2 * (os.cpu_count() or 1)))

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-[0-9]+", self.region):
            raise ConfigError(f"region must be like us-west-2, got {self.region!r}")
        if not re.fullmatch(r"[0-9]{12}", self.account_id):
            raise ConfigError(f"account_id must be 12 digits, got {self.account_id!r}")
        if self.parallel_starts < 1:
            raise ConfigError(f"parallel_starts must be at least 1, got {self.parallel_starts!r}")
