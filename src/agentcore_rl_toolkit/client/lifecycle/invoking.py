"""Getting an invoke accepted: the place in the queue, the pace, and what may be sent again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ...contract import Outcome, Stage
from ...errors import AgentError, ConfigError, InvalidResultError, RolloutError, RolloutLostError, RolloutThrottledError
from ..data_plane.delivery import AgentWord, Resend
from ..data_plane.pacing import Pacer, backoff_s
from ..data_plane.stops import take_turn
from ..data_plane.transport import (
    NO_CREDENTIALS,
    STORE_REFUSED,
    AgentTransport,
    DaemonPool,
    InvokeFailedError,
    InvokeRefusedError,
    InvokeServerError,
    InvokeUncertainError,
    parse_reply,
)
from .events import Events
from .flight import AttemptEnded, Flight, timed_out

logger = logging.getLogger(__name__)


class Invoker:
    """Sends invokes, one request per session unless the runtime says that it took none, or a second one does no harm
    (`delivery`). Lives on the engine's loop.

    ``room()`` is awaited before each invoke: it holds them back while too many sessions wait for their stop.
    """

    def __init__(
        self,
        transport: AgentTransport,
        pacer: Pacer,
        events: Events,
        *,
        word: AgentWord,
        resend: Resend,
        max_attempts: int,
        pool_size: int,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        self._word = word
        self._resend = resend
        self._transport = transport
        self._pacer = pacer
        self._events = events
        self._max_attempts = max_attempts
        self._pool = DaemonPool(pool_size, "agentcore-rl-invoke")
        self._room = room
        self._admission = asyncio.Lock()

    def close(self) -> None:
        """Keep no threads that have nothing to do."""
        self._pool.close()

    async def start(self, flight: Flight, body: bytes) -> dict[str, Any] | None:
        """Get the invoke accepted. None: it went out, and whether it was accepted is unknown."""
        request, progress = flight.request, flight.progress
        deadlines, session_id = request.deadlines, progress.session_id
        flight.server_error = None
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
                reply = parse_reply(raw, session_id)
                flight.server_error = None
                self._word.answered(reply)
                return reply
            except InvokeServerError as e:
                flight.server_errors, flight.server_error = flight.server_errors + 1, e
                self._events.server_error(progress)
                if not self._may_send_again or flight.server_errors >= self._max_attempts:
                    return None
                logger.info("sending the invoke again after %s", e, extra={"session_id": session_id})
                await asyncio.sleep(self._error_pause_s(flight))
            except InvokeRefusedError as e:
                if not flight.server_errors:  # of an earlier delivery there may be a session
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
                flight.server_error = None
                logger.info(
                    "no answer to the invoke (%s); looking for signs of the session",
                    e,
                    extra={"session_id": session_id},
                )
                return None
            except InvokeFailedError as e:
                raise self._failed(flight, e) from e
            except ConfigError as e:  # there is no client to send with: a profile that does not exist, no region
                flight.invoke = None
                raise AttemptEnded(Outcome.INVALID, e) from e
            except TimeoutError as e:
                if request.timeout_s is not None and request.timeout_s <= deadlines.start_s:
                    raise timed_out(flight, Stage.START) from e
                flight.server_error = None
                return None

    @property
    def _may_send_again(self) -> bool:
        return self._resend is True or (self._resend == "auto" and self._word.runs_once)

    async def may_start_again(self, flight: Flight) -> bool:
        """After an answer of 500 or 503, when no sign of the session was seen: whether the same invoke may be sent again.

        It may where the agent is known by now to run once, and where the runtime says that there is no such session. Where there
        was one, this ends it.
        """
        if flight.server_error is None or self._resend != "auto" or flight.server_errors >= self._max_attempts:
            return False
        if not self._word.runs_once:
            try:
                async with asyncio.timeout(flight.request.deadlines.stop_s):
                    await take_turn(self._pacer.try_stop)
                    if await self._pool.run(self._transport.stop, flight.progress.session_id):
                        return False
            except (InvokeRefusedError, InvokeUncertainError, InvokeFailedError, TimeoutError) as e:
                logger.info("the runtime could not be asked for the session: %s", e)
                return False
        await asyncio.sleep(self._error_pause_s(flight))
        return True

    @staticmethod
    def _error_pause_s(flight: Flight) -> float:
        return backoff_s(flight.server_errors, base_s=0.5, cap_s=10.0, jitter=random.random())

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
        if (
            e.code == "RuntimeClientError"
        ):  # AWS says no more than this: it did not come up, died, or answered 4xx or 5xx
            error = RolloutLostError(f"the session ended, or its agent failed, before it took the invoke: {e}")
            return AttemptEnded(Outcome.LOST, error)
        if e.code == STORE_REFUSED:
            return AttemptEnded(Outcome.LOST, RolloutLostError(str(e)))
        if e.code == "AgentRefused":
            return AttemptEnded(Outcome.AGENT_ERROR, AgentError(str(e), error_type=e.code))
        if e.code == "BadReply":
            return AttemptEnded(Outcome.INVALID, InvalidResultError(str(e)))
        if not flight.server_errors:
            flight.invoke = None  # refused before any session existed
        if e.code == NO_CREDENTIALS:
            return AttemptEnded(Outcome.INVALID, ConfigError(str(e)))
        return AttemptEnded(Outcome.INVALID, ConfigError(f"the runtime does not accept this request: {e}"))


def _consume(call: asyncio.Future[bytes]) -> None:
    # An invoke that outlives its rollout must not complain that nobody read its error.
    if not call.cancelled():
        call.exception()
