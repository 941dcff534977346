"""The parts of a gateway that its administration shows and changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..calls.outage import Outage
from ..calls.running import RunningCalls
from ..config import GatewayConfig
from ..sessions.registry import Sessions
from ..upstreams.router import Router
from .health import Lag, Samplers, StoredState


class TokenMode(Protocol):
    """The gateway's own tokenising."""

    @property
    def executor(self) -> Any: ...
    @property
    def renderer(self) -> Any: ...
    @property
    def histories(self) -> Any: ...


@dataclass(kw_only=True)
class Parts:
    """See the module."""

    config: GatewayConfig
    counters: Counter[str]
    sessions: Sessions
    router: Router
    running: RunningCalls
    outage: Outage
    connections: Sized
    lag: Lag
    token_mode: TokenMode | None
    tinker: Samplers | None
    state: StoredState
    started_s: float = field(default_factory=time.time)

    def servers(self) -> list[dict[str, Any]]:
        """The inference servers, as routes show them."""
        now = time.monotonic()
        return [
            {
                "worker_id": w.id,
                "url": w.config.url,
                "api_path": w.config.api_path,
                "model_name": w.config.model_name,
                "engine": w.config.engine,
                "weight": w.config.weight,
                "active": w.inflight,
                "calls": w.calls,
                "failures": w.total_failures,
                "healthy": w.resting_until <= now,
                "active_requests": w.inflight,
                "draining": w.draining,
            }
            for w in self.router.workers.values()
        ]
