"""Getting an invoke accepted: the place in the queue, the pace, and what may be sent again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..contract import Outcome, Stage
from ..errors import (
    AgentError,
    ConfigError,
    InvalidResultError,
    RolloutError,
    RolloutLostError,
    RolloutThrottledError,
    RolloutTimeoutError,
)
from .events import Events
from .flight import AttemptEnded, Flight, timed_out
from .pacing import Pacer, backoff_s
from .stops import take_turn
from .transport import (
    STORE_REFUSED,
    AgentTransport,
    DaemonPool,
    InvokeFailedError,
    InvokeRefusedError,
    InvokeUncertainError,
    parse_reply,
)

logger = logging.getLogger(__name__)


class Invoker:
    """Sends invokes, one request per session unless the runtime says that it took none. Lives on the engine's loop.

    ``room()`` is awaited before each invoke: it holds them back while too many sessions wait for their stop.
    """

    def __init__(
        self,
        transport: AgentTransport,
        pacer: Pacer,
        events: Events,
        *,
        max_attempts: int,
        pool_size: int,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._pacer = pacer
        self._events = events
        self._max_attempts = max_attempts
        self._pool = DaemonPool(pool_size, "agentcore-rl-invoke")
        self._room = room
        self._admission = asyncio.Lock()

    async def start(self, flight: Flight, body: bytes) -> dict[str, Any] | None:
        """Get the invoke accepted. None: it went out, and whether it was accepted is unknown."""
        request, progress = flight.request, flight.progress
        deadlines, session_id = request.deadlines, progress.session_id
        failures = 0
        refused_since_s: float | None = None
        while True:
            progress.enter(Stage.QUEUE)
            await self._admit(flight)
            progress.enter(Stage.START)
            call = asyncio.ensure_future(self._pool.run(self._transport.invoke, session_id, body))
            flight.invoke = call
            call.add_done_callback(_consume)
            patience_s = deadlines.start_s if request.timeout_s is None else min(deadlines.start_s, request.timeout_s)
            try:
                async with asyncio.timeout(patience_s):
                    raw = await asyncio.shield(call)
                return parse_reply(raw, session_id)
            except InvokeRefusedError as e:
                flight.invoke = None
                now = time.monotonic()
                failures += 1
                if e.kind == "throttled":
                    self._pacer.start_refused(now)
                    self._events.refused(progress)
                    refused_since_s = refused_since_s if refused_since_s is not None else now
                    if deadlines.throttle_s is not None and now - refused_since_s >= deadlines.throttle_s:
                        error: RolloutError = RolloutThrottledError(
                            f"the runtime refused for {now - refused_since_s:.0f} s ({e}); lower tps_limit or "
                            "sessions_per_minute, or ask for a higher quota"
                        )
                        raise AttemptEnded(Outcome.THROTTLED, error) from e
                elif failures >= self._max_attempts:
                    if e.kind == "busy":
                        raise AttemptEnded(
                            Outcome.THROTTLED, RolloutThrottledError(f"refused {failures} times: {e}")
                        ) from e
                    lost = RolloutLostError(f"the runtime could not be reached in {failures} tries: {e}")
                    raise AttemptEnded(Outcome.LOST, lost) from e
                await asyncio.sleep(backoff_s(failures, base_s=0.25, cap_s=5.0, jitter=random.random()))
            except InvokeUncertainError as e:
                logger.info(
                    "no answer to the invoke (%s); looking for signs of the session",
                    e,
                    extra={"session_id": session_id},
                )
                return None
            except InvokeFailedError as e:
                raise self._failed(flight, e) from e
            except TimeoutError as e:
                if request.timeout_s is not None and request.timeout_s <= deadlines.start_s:
                    raise timed_out(flight, Stage.START) from e
                return None

    async def _admit(self, flight: Flight) -> None:
        """Wait for this rollout's turn: first come, first served, at the pace of the agent."""
        try:
            async with asyncio.timeout(flight.request.deadlines.queue_s):
                async with self._admission:
                    await self._room()
                    await take_turn(self._pacer.try_start)
        except TimeoutError as e:
            raise timed_out(flight, Stage.QUEUE) from e

    def _failed(self, flight: Flight, e: InvokeFailedError) -> AttemptEnded:
        """The verdict for an invoke that was refused for good or answered with an error."""
        if e.code == "RuntimeClientError":
            if "initialization" in str(e).lower():
                return AttemptEnded(
                    Outcome.TIMEOUT, RolloutTimeoutError(f"the session did not come up: {e}", stage=Stage.START.value)
                )
            return AttemptEnded(
                Outcome.AGENT_ERROR, AgentError(f"the agent answered the invoke with an error: {e}", error_type=e.code)
            )
        if e.code == STORE_REFUSED:
            return AttemptEnded(Outcome.LOST, RolloutLostError(str(e)))
        if e.code == "AgentRefused":
            return AttemptEnded(Outcome.AGENT_ERROR, AgentError(str(e), error_type=e.code))
        if e.code == "BadReply":
            return AttemptEnded(Outcome.INVALID, InvalidResultError(str(e)))
        flight.invoke = None  # refused before any session existed
        return AttemptEnded(Outcome.INVALID, ConfigError(f"the runtime does not accept this request: {e}"))


def _consume(call: asyncio.Future[bytes]) -> None:
    # An invoke that outlives its rollout must not complain that nobody read its error.
    if not call.cancelled():
        call.exception()
