"""A batch's sessions at the gateway: made, fetched and deleted in bulk, through a restart of the gateway.

A gateway that cannot be reached is waited for: its store is durable, so what it recorded is there when it is back. An
answer that cannot be read is asked for again in halves, so that one broken session takes no other with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ...errors import GatewayError
from .groups import CollectConfig

log = logging.getLogger(__name__)

SESSIONS_PER_CALL = 256  # keeps a bulk reply of 20-turn sessions at tens of MB
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

# A gateway that restarts, behind a proxy or not; any other status is an answer, which asking again would repeat.
_PASSING = (None, 429, 502, 503, 504)
_REFUSED = (401, 403)


class Gateway(Protocol):
    """The part of `GatewayClient` that is used here."""

    async def create_sessions_async(
        self,
        session_ids: Sequence[str],
        *,
        sampling_params: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        max_turns: int | None = None,
    ) -> Any: ...
    async def fetch_async(self, session_ids: Sequence[str], *, close: bool = True) -> Any: ...
    async def delete_async(self, session_ids: Sequence[str]) -> int: ...


class Sessions:
    """The sessions that one batch has at `gateway`."""

    def __init__(self, gateway: Gateway, config: CollectConfig) -> None:
        self._gateway, self._config = gateway, config
        self._made: dict[str, None] = {}
        self._away_since_s: float | None = None  # when the gateway was last heard of, while it cannot be reached

    async def make(self, session_ids: Sequence[str], params: Mapping[str, Any] | None) -> dict[str, Any]:
        """Open sessions with these sampling parameters. Returns their addresses. Raises: GatewayError."""
        found: dict[str, Any] = {}
        config = self._config
        for start in range(0, len(session_ids), SESSIONS_PER_CALL):
            part = list(session_ids[start : start + SESSIONS_PER_CALL])
            self._made |= dict.fromkeys(part)  # before the call: a reply that gets lost must not leave sessions behind

            async def create(part: list[str] = part) -> Any:
                # Opening a session that is open already gives the same one, so a lost reply may be asked for again.
                return await self._gateway.create_sessions_async(
                    part, sampling_params=params, model_id=config.model_id, max_turns=config.max_turns
                )

            found |= {handle.session_id: handle for handle in await self._ask(create, "make sessions")}
            missing = next((s for s in part if s not in found), None)
            if missing is not None:
                raise GatewayError("the gateway did not make this session", session_id=missing)
        return found

    async def fetch(self, session_ids: Sequence[str]) -> tuple[dict[str, Any], dict[str, BaseException]]:
        """Close sessions and get what was recorded of them, and for those that could not be had, why.

        Those stay at the gateway when the batch is deleted, until its own retention limit.
        """
        if not session_ids:
            return {}, {}

        async def fetch() -> Any:
            return await self._gateway.fetch_async(session_ids, close=True)

        try:
            return dict(await self._ask(fetch, "hand out trajectories")), {}
        except Exception as e:  # a rollout without its trajectory becomes data; the exception object is kept
            status = e.status if isinstance(e, GatewayError) else 0
            if len(session_ids) > 1 and status not in (*_PASSING, *_REFUSED):
                middle = len(session_ids) // 2
                captures, failures = await self.fetch(session_ids[:middle])
                more, others = await self.fetch(session_ids[middle:])
                return {**captures, **more}, {**failures, **others}
            log.warning("fetching %d trajectories failed: %s: %s", len(session_ids), type(e).__name__, e)
            for session_id in session_ids:
                self._made.pop(session_id, None)
            return {}, dict.fromkeys(session_ids, e)

    async def delete(self) -> None:
        """Delete what was made and fetched; a failure is logged, the gateway's retention limit does it then."""
        made = list(self._made)
        for start in range(0, len(made), SESSIONS_PER_CALL):
            part = made[start : start + SESSIONS_PER_CALL]
            try:
                await asyncio.wait_for(self._gateway.delete_async(part), self._config.gateway_timeout_s)
            except Exception as e:  # the data is already here
                log.warning("could not delete %d gateway sessions: %s", len(made) - start, e)
                return

    async def _ask(self, call: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Ask until the gateway answers or has been away for `gateway_patience_s`. Raises: what came last."""
        limit_s, pause_s = self._config.gateway_timeout_s, FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                answer = await asyncio.wait_for(call(), limit_s)
                self._away_since_s = None
                return answer
            except (TimeoutError, OSError, GatewayError) as e:
                error: BaseException = e
                if isinstance(e, GatewayError) and e.status not in _PASSING:
                    self._away_since_s = None
                    raise
                if isinstance(e, TimeoutError) and not isinstance(e, GatewayError):
                    error = GatewayError(f"the gateway did not {what} within {limit_s:g} s; is it running?")
                    error.__cause__ = e
            if self._away_since_s is None:
                self._away_since_s = began_s
            away_s = time.monotonic() - self._away_since_s
            if away_s >= self._config.gateway_patience_s:
                raise error
            if pause_s == FIRST_PAUSE_S:
                log.warning(
                    "the gateway did not %s (%s); asking again for %g s", what, error, self._config.gateway_patience_s
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
