"""The state of a gateway that administrators see and change. The weight version and a pause outlive a restart.

An administrator's request is answered when its change is stored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import GatewayConfig
from ..routing.outage import Outage
from ..routing.router import Router
from ..routing.running import RunningCalls
from ..sessions.registry import Sessions
from ..store.writer import Store

if TYPE_CHECKING:
    from ..sampling_services.samplers import Samplers

_STATE = "state"


class Lag:
    """How late timers run: the last one, and the one that was latest. Units: seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.most_s = 0.0

    def saw(self, late_s: float) -> None:
        self.now_s = late_s
        self.most_s = max(self.most_s, late_s)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """``sampler`` is what a sampling service samples as that version."""

    weight_version: int | None = None
    paused: bool = False
    sampler: str | None = None


class StoredState:
    """The state of a gateway in its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def take_up(self, config: GatewayConfig, running: RunningCalls, samplers: Samplers | None) -> None:
        """Go on with what was stored. What the configuration names wins, and is stored in its place."""
        kept = self._store.reader.value(_STATE)
        if kept is not None:
            stored = msgspec.json.decode(kept, type=State)
            running.paused = stored.paused
            same = config.sampler in (None, stored.sampler)
            # A sampler's version is not that of another engine's weights.
            if same and (samplers is not None or stored.sampler is None):
                running.weight_version = stored.weight_version
                if samplers is not None and stored.sampler is not None:
                    samplers.wanted = (stored.sampler, stored.weight_version)
        if config.sampler is not None:
            self._put(running, samplers)
            self._store.commit()

    def _put(self, running: RunningCalls, samplers: Samplers | None) -> None:
        models = samplers.models() if samplers is not None else []
        sampler = models[0] if models else None
        state = State(weight_version=running.weight_version, paused=running.paused, sampler=sampler)
        self._store.set(_STATE, msgspec.json.encode(state))

    async def keep(self, running: RunningCalls, samplers: Samplers | None) -> None:
        """Return when what holds now is stored. Raises: OSError; it is stored as soon as that can be, all the same."""
        self._put(running, samplers)
        error = await self._store.kept()
        if error is not None:
            raise error


@dataclass(kw_only=True)
class Parts:
    """The parts of a gateway that its administration shows and changes."""

    config: GatewayConfig
    counters: Counter[str]
    sessions: Sessions
    router: Router
    running: RunningCalls
    outage: Outage
    connections: Sized
    lag: Lag
    token_mode: Any  # `token_calls.mode.TokenMode`, or None
    samplers: Samplers | None
    state: StoredState

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
                "active": w.inflight,
                "calls": w.calls,
                "failures": w.total_failures,
                "healthy": w.resting_until <= now,
                "active_requests": w.inflight,
                "draining": w.draining,
            }
            for w in self.router.workers.values()
        ]
