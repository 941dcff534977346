"""While no inference server is up, calls wait. The gateway probes the servers, and asks those that come back for their weights.

A server that was started again has the weights it was started with, not those that the trainer published. vLLM and SGLang
show it: their version is then "default" where it was a number. Turns of such a server are marked and not trained, until the
trainer publishes weights again.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ..._servers.tasks import Tasks
from ...errors import GatewayError
from ...messages.errors import NOT_JSON, RequestError
from ..config import Limits
from .router import Router, Worker

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOK_S = 5.0  # for one answer
_WEIGHTS = {"vllm": b"/weight_info", "sglang": b"/model_info", "sglang-experts": b"/model_info"}


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


class Outage:
    """Lets calls wait and probes the servers. Without `Limits.outage_s` calls fail at once and no server is probed."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self._router = router
        self._limits = limits
        self._waiting = 0
        self._back = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._tasks = Tasks()

    def __len__(self) -> int:
        return self._waiting

    @property
    def problem(self) -> str | None:
        """A message for the operator; None when all is well."""
        workers = list(self._router.workers.values())
        if workers and all(worker.resting_until for worker in workers):
            return "no inference server is up"
        if any(worker.forgot for worker in workers):
            return "an inference server was started again and has not the published weights"
        return None

    def waits(self) -> bool:
        """Return True if a call that no server took should wait. Otherwise some server is only busy."""
        workers = [worker for worker in self._router.workers.values() if not worker.draining]
        return bool(self._limits.outage_s) and all(worker.resting_until for worker in workers)

    async def over(self, until: float) -> None:
        """Return when a server is back. ``until`` is on the event loop's clock. Raises: RequestError."""
        if self._probing is None or self._probing.done():
            log.warning("no inference server is up: calls wait for up to %g s", self._limits.outage_s)
            self._back.clear()
            self._probing = self._tasks.start(self._probe())
        self._waiting += 1
        try:
            async with asyncio.timeout_at(until):
                await self._back.wait()
        except TimeoutError:
            why = f"no inference server has been up for {self._limits.outage_s:g} s; try again later"
            raise RequestError(why, kind="overloaded") from None
        finally:
            self._waiting -= 1

    async def _probe(self) -> None:
        while self._waiting:
            await asyncio.sleep(min(LOOK_EVERY_S, self._limits.outage_s))
            workers = list(self._router.workers.values())
            answers = await asyncio.gather(*map(self._is_up, workers))  # one that hangs delays no other
            back = [worker for worker, up in zip(workers, answers, strict=True) if up]
            if back:
                log.warning("inference server %s is back; %d calls go on", back[0].config.url, self._waiting)
                self._back.set()
                return

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
