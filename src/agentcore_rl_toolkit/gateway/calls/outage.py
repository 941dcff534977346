"""While no inference server is up, calls wait. The gateway probes the servers, and asks those that come back for their weights.

A server that was started again has the weights it was started with, not those that the trainer published. vLLM and SGLang
show it: their version is then "default" where it was a number. Turns of such a server are marked and not trained, until the
trainer publishes weights again.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from ..._servers.tasks import Tasks
from ...errors import GatewayError
from ...messages.errors import NOT_JSON, RequestError
from ..config import Limits
from ..upstreams.router import Router, Worker
from .running import RunningCall, RunningCalls
from .states import State

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOK_S = 5.0  # for one answer
_WEIGHTS = {"vllm": b"/weight_info", "sglang": b"/model_info", "sglang-experts": b"/model_info"}


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


class Outage:
    """Lets calls wait and probes the servers. Without `Limits.outage_s` calls fail at once and no server is probed."""

    def __init__(self, router: Router, running: RunningCalls, limits: Limits) -> None:
        self._router = router
        self._running = running
        self._limits = limits
        self._waiting: dict[RunningCall, float] = {}  # until when
        self._looking: asyncio.Task[None] | None = None
        self._tasks = Tasks()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def problem(self) -> str | None:
        """A message for the operator; None when all is well."""
        workers = list(self._router.workers.values())
        if workers and all(worker.resting_until for worker in workers):
            return "no inference server is up"
        if any(worker.forgot for worker in workers):
            return "an inference server was started again and has not the published weights"
        return None

    def hold(self, call: RunningCall, until: float | None) -> float | None:
        """Let a call wait that no server took. ``until``: it has waited before, and may wait that long.

        Returns until when it waits, None when it is not to: some server is only busy, or its time is over.
        """
        now = time.monotonic()
        workers = [worker for worker in self._router.workers.values() if not worker.draining]
        if not self._limits.outage_s or any(not worker.resting_until for worker in workers):
            return None
        until = now + self._limits.outage_s if until is None else until
        if now >= until:
            return None
        if self._looking is None or self._looking.done():
            log.warning("no inference server is up: calls wait for up to %g s", self._limits.outage_s)
            self._looking = self._tasks.start(self._look())
        call.become(State.HELD)
        self._waiting[call] = until
        return until

    async def _look(self) -> None:
        """While calls wait: end what has waited too long, and look whether a server is back."""
        while self._waiting:
            await asyncio.sleep(min(LOOK_EVERY_S, self._limits.outage_s))
            for call in [call for call, until in self._waiting.items() if call.ended or time.monotonic() >= until]:
                del self._waiting[call]
                why = f"no inference server has been up for {self._limits.outage_s:g} s; try again later"
                call.abort(RequestError(why, kind="overloaded"))
            workers = list(self._router.workers.values())
            answers = await asyncio.gather(*map(self._is_up, workers))  # one that hangs delays no other
            back = [worker for worker, up in zip(workers, answers, strict=True) if up]
            if not back or self._running.paused:
                continue
            waiting, self._waiting = list(self._waiting), {}
            log.warning("inference server %s is back; %d calls go on", back[0].config.url, len(waiting))
            for call in waiting:
                if not call.ended:
                    call.route()

    async def _is_up(self, worker: Worker) -> bool:
        try:
            status, _ = await worker.ask(b"/health", timeout_s=LOOK_S)
        except GatewayError:
            return False
        if status >= 500:  # any other server that answers is up: plain endpoints have no such route
            return False
        await self.ask(worker)
        worker.succeeded()
        return True

    def begin(self) -> None:
        """Ask all servers which weights they have: when the gateway starts, and when weights were published."""
        for worker in self._router.workers.values() if self._limits.outage_s else ():
            self._tasks.start(self.ask(worker))

    async def ask(self, worker: Worker) -> None:
        """Ask a server which weights it has."""
        route = _WEIGHTS.get(worker.config.engine)
        if route is None:
            return
        try:
            status, body = await worker.ask(route, timeout_s=LOOK_S)
            if status == 200:
                worker.says(msgspec.json.decode(body, type=_WeightInfo).weight_version)
        except (GatewayError, *NOT_JSON):
            return  # it is not up yet, or has no such route

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
