"""The rollouts of one client, on the client's own loop: how they begin, how they are looked up, and how they end with it."""

from __future__ import annotations

import asyncio
import atexit
from typing import Any

from ..._portal import Portal
from ...contract import Outcome, check_session_id
from ...errors import ConfigError, RolloutCancelledError
from ..future import RolloutFuture, Verdict
from ..settings import RolloutRequest
from .rollout import Adoption, Rollout, Services


class Engine:
    """Starts rollouts and ends them with the client. Public methods are thread-safe."""

    def __init__(self, services: Services, stop_s: float) -> None:
        self.services = services
        self._portal = services.portal
        self._stop_s = stop_s
        self._rollouts: dict[RolloutFuture, Rollout] = {}
        self._closing = False

    # ---- from any thread

    def submit(self, request: RolloutRequest, *, adopt: Adoption | None = None) -> RolloutFuture:
        """Start a rollout; returns at once. With `adopt` its session is not started but waited for."""
        check_session_id(request.session_id)
        if self._closing:
            raise ConfigError("the client is closed; make a new one")
        loop = self._portal.loop
        rollout = Rollout(self.services, request, adopt)
        if self._portal.on_own_thread:
            self._launch(rollout)
        else:
            loop.call_soon_threadsafe(self._launch, rollout)
        return rollout.future

    def refuse_more(self) -> None:
        """From now on, `submit` raises."""
        self._closing = True

    @property
    def in_flight(self) -> int:
        """Rollouts without a verdict."""
        return len(self._rollouts)

    def flights(self) -> list[dict[str, Any]]:
        """Where each of them is."""
        return [rollout.described() for rollout in list(self._rollouts.values())]

    # ---- on the loop

    async def close_async(self, *, cancel: bool) -> None:
        """End what runs (with `cancel`), then wait for the stops up to their deadline."""
        self._closing = self._closing or cancel
        if cancel:
            for rollout in list(self._rollouts.values()):
                error = RolloutCancelledError("the client was closed")
                rollout.end(Verdict(outcome=Outcome.CANCELLED, error=error))
        ending = [r.task for r in self._rollouts.values() if r.task is not None and r.forced is not None]
        if ending:
            await asyncio.wait(ending)
        services = self.services
        await services.stops.drain(self._stop_s)
        if cancel:
            services.endings.close()
            services.stores.close()

    def _launch(self, rollout: Rollout) -> None:
        if self._closing:
            rollout.resolve()
            return
        self._rollouts[rollout.future] = rollout
        rollout.start().add_done_callback(lambda _: self._rollouts.pop(rollout.future, None))


# Engines that may still have sessions to stop. Strong on purpose: a dropped client must not take its stops with it.
open_engines: set[tuple[Portal, Engine]] = set()


@atexit.register
def _flush_at_exit() -> None:
    """Send the stops that are still open. Rollouts in flight are left running: their results will be in the store."""
    for portal, engine in list(open_engines):
        if portal.started:
            portal.call(engine.close_async(cancel=False))
