"""While no inference server is up: calls wait, the servers are looked at, and those that come back are asked what they have.

A server that was started again has the weights it was started with, whatever the trainer published. vLLM and SGLang say so:
their version is then "default" where it was a number. Turns of such a server are marked and not trained, until weights are
published again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

import msgspec

from ...errors import GatewayError
from ...messages.errors import NOT_JSON, RequestError
from ..config import Limits
from ..engines.errors import upstream_error
from ..sessions.session import RunningCall
from ..upstreams.router import Router, Worker
from .running import RunningCalls
from .states import State

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOK_S = 5.0  # for one answer
MOST_CALLS = 20_000  # that wait
_GENERATE = b"/inference/v1/generate"
_WEIGHTS = {"vllm": b"/weight_info", "sglang": b"/model_info", "sglang-experts": b"/model_info"}


class Outage:
    """See the module. Without `Limits.outage_s` it does nothing: calls fail at once, no server is looked at."""

    def __init__(
        self, router: Router, running: RunningCalls, limits: Limits, counters: Counter[str], *, token_ids: bool
    ) -> None:
        self._router = router
        self._running = running
        self._limits = limits
        self._counters = counters
        self._token_ids = token_ids  # whether calls go to the engines' token routes
        self._waiting: dict[RunningCall, float] = {}  # until when
        self._looking: asyncio.Task[None] | None = None
        self._next_look = 0.0
        self._problems: dict[str, str] = {}  # by server: why calls cannot be served there

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def problem(self) -> str | None:
        """What an operator has to know; None when all is well."""
        workers = list(self._router.workers.values())
        if workers and all(worker.resting_until for worker in workers):
            return "no inference server is up"
        if any(worker.forgot for worker in workers):
            return "an inference server was started again and has not the published weights"
        return next(iter(self._problems.values()), None)

    # -- waiting

    def hold(self, call: RunningCall, until: float | None) -> float | None:
        """Let a call wait, if no server is up and there is room. Returns until when; None: it may not wait (any longer)."""
        now = time.monotonic()
        workers = [worker for worker in self._router.workers.values() if not worker.draining]
        if not self._limits.outage_s or any(not worker.resting_until for worker in workers):
            return None
        until = now + self._limits.outage_s if until is None else until
        if now >= until or len(self._waiting) >= MOST_CALLS:
            return None
        if not self._waiting:
            log.warning("no inference server is up: calls wait for up to %g s", self._limits.outage_s)
        self._counters["held_for_a_server"] += 1
        call.become(State.HELD)
        self._waiting[call] = until
        return until

    def tend(self, now: float) -> None:
        """End what has waited too long; look whether a server is back. For the gateway's ticker."""
        for call, until in list(self._waiting.items()):
            if call.ended or now >= until:
                del self._waiting[call]
                why = f"no inference server has been up for {self._limits.outage_s:g} s; try again later"
                call.abort(RequestError(why, kind="overloaded"))
        if not self._waiting or (self._looking is not None and not self._looking.done()) or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        back = [worker for worker in list(self._router.workers.values()) if await self._is_up(worker)]
        if not back or self._running.paused:
            return
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

    # -- what servers say of themselves

    def begin(self) -> None:
        """Ask all servers when the gateway starts, and when weights were published."""
        if self._limits.outage_s:
            self._looking = asyncio.ensure_future(self._ask_all())

    async def _ask_all(self) -> None:
        for worker in list(self._router.workers.values()):
            await self.ask(worker)

    async def ask(self, worker: Worker) -> None:
        """Ask a server which weights it has, and a vLLM whether it takes token ids."""
        route = _WEIGHTS.get(worker.config.engine)
        if route is None:
            return
        try:
            if self._token_ids and worker.config.engine == "vllm":
                await self._check_route(worker)
            status, body = await worker.ask(route, timeout_s=LOOK_S)
            if status == 200:
                worker.says(msgspec.json.decode(body, type=_WeightInfo).weight_version)
        except (GatewayError, *NOT_JSON):
            return  # it is not up yet, or has no such route

    async def _check_route(self, worker: Worker) -> None:
        status, body = await worker.ask(_GENERATE, b"{}", timeout_s=LOOK_S)  # it is refused with 400, or not there
        self._problems.pop(worker.id, None)
        if status in (401, 403, 404):
            self._problems[worker.id] = why = str(upstream_error(status, body))
            log.error("inference server %s takes no token ids: %s", worker.config.url, why)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None
