"""Configuration of a local runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Everything a local runtime can be told. Units: seconds.

    ``idle_timeout_s`` and ``max_lifetime_s`` are AWS's defaults for an agent that sets no lifecycle of its own.
    ``init_timeout_s`` is the platform's limit for the first healthy /ping (30 s on V1, 120 s on V2). ``stop_grace_s`` is the
    time between SIGTERM and SIGKILL of a stopped session; ``shutdown_grace_s`` the same when the whole runtime ends.
    """

    region: str = "us-west-2"
    account_id: str = "123456789012"
    state_dir: Path | None = None
    session_env: Mapping[str, str] = field(default_factory=dict)
    start_mode: str = "auto"
    strict_snapshot: bool = False
    init_timeout_s: float = 30.0
    idle_timeout_s: float = 900.0
    max_lifetime_s: float = 28_800.0
    stop_grace_s: float = 60.0
    shutdown_grace_s: float = 5.0
    invoke_timeout_s: float = 900.0
    stream_timeout_s: float = 3_600.0
    ping_semantics: str = "docs"
