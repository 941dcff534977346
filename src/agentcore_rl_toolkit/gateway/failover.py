"""Samples a call at the session's server, and at other servers while nothing of the reply has reached the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from ..messages.dialects import Delta
from ..messages.errors import RequestError
from .context import Context
from .engine import Engine
from .router import ServerLostError, StatusError, Worker

if TYPE_CHECKING:
    from .call import Call

MAX_TRIES = 4
_TRY_ELSEWHERE = frozenset({429, 502, 503, 504})


async def sample(call: Call, engine: Engine, context: Context) -> AsyncGenerator[list[Delta], None]:
    """The deltas of the reply. Raises: ServerLostError, StatusError, RequestError, CaptureError, UpstreamError."""
    session, running, router, outage = call.session, context.running, context.router, context.outage
    tried: tuple[Worker, ...] = ()
    second = False  # whether the only server has been given a second chance
    until: float | None = None  # when the call has waited long enough for a server to come up
    call.enter("sampling", context.limits.call_s)
    while True:
        await running.resumed(call)
        worker = session.worker = call.worker = router.pick(session.worker, tried)
        if worker is None:
            raise RequestError(
                "the gateway has no inference server; add one with POST /admin/workers", kind="overloaded"
            )
        worker.inflight += 1
        worker.calls += 1
        begun, changes = running.weight_version, running.changes
        try:
            async with aclosing(engine.sample(worker)) as blocks:
                async for deltas in blocks:
                    yield deltas
        except StatusError as e:
            if e.code >= 500:
                worker.failed(unreachable=False, why=str(e))
            tried = (*tried, worker)
            if e.code not in _TRY_ELSEWHERE or len(tried) >= MAX_TRIES or router.pick(None, tried) is None:
                raise
        except ServerLostError as e:
            worker.failed(unreachable=True, why=str(e.__cause__ or e))
            if call.reply:
                raise
            tried = (*tried, worker)
            if router.pick(None, tried) is not None and len(tried) < MAX_TRIES:
                pass
            elif not (second or e.refused or worker.draining or router.pick(None, tried) is not None):
                second, tried = True, tried[:-1]
            elif outage.waits():
                now = asyncio.get_running_loop().time()
                until = until or now + context.limits.outage_s
                if now >= until:
                    raise
                call.enter("held", None)
                await outage.over(until)
                call.enter("sampling", context.limits.call_s)
                second, tried = False, ()
            else:
                raise
        else:
            worker.succeeded()
            call.versions = engine.versions(begun, running.weight_version)
            call.changed = running.changes != changes
            return
        finally:
            worker.inflight -= 1
        context.counters["retries"] += 1
        call.reset()
