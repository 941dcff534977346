"""A batch's sessions at the gateway: made, fetched and deleted in bulk, through a restart of the gateway.

The collection waits for a gateway that cannot be reached: its store is durable, so its records are there when it is back. An
answer that cannot be read is asked for again in halves, so that one broken session spoils no other. One of several gateways that
stays away for longer is lost, with its sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import GatewayError, GatewayLostError
from ...logs import WarnsOnceAMinute
from .groups import CollectConfig

if TYPE_CHECKING:
    from ...gateway import GatewayClient

log = logging.getLogger(__name__)

SESSIONS_PER_CALL = 256  # keeps a bulk reply of 20-turn sessions at tens of MB
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

# A gateway that restarts, behind a proxy or not; any other status is an answer, which asking again would repeat.
_PASSING = (None, 429, 502, 503, 504)
_REFUSED = (401, 403)


class Sessions:
    """The sessions that one batch has at `gateway`."""

    def __init__(self, gateway: GatewayClient, config: CollectConfig) -> None:
        self._gateway = gateway
        self._config = config
        found = tuple(getattr(gateway, "urls", ()))
        self.urls: tuple[str, ...] = found if len(found) > 1 else ()  # of the gateways, where there are several
        self._made: dict[str, None] = {}
        self._warnings = WarnsOnceAMinute(log)
        # When each gateway that does not answer was last asked with success.
        self._silent_since_s: dict[str | None, float] = {}
        self._waiting: dict[str | None, dict[str, asyncio.Future[tuple[Any, BaseException | None]]]] = {}
        self._fetching: dict[str | None, asyncio.Task[None]] = {}

    @property
    def away(self) -> Mapping[str, float]:
        """Those of several gateways that did not answer when they were last asked, and for how many seconds."""
        return self._gateway.silent if self.urls else {}

    @property
    def lost(self) -> set[str]:
        """The gateways that have been away for so long that they are not waited for."""
        return {url for url, away_s in self.away.items() if away_s >= self._config.gateway_patience_s}

    async def look(self) -> None:
        """See which of several gateways answer."""
        try:
            await self._gateway.away_async()
        except (OSError, GatewayError) as e:
            log.warning("could not look at the gateways: %s", e)

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
                    part,
                    sampling_params=params,
                    model_id=config.model_id,
                    max_turns=config.max_turns,
                    train=config.train,
                )

            found |= {handle.session_id: handle for handle in await self._ask(create, "make sessions")}
            missing = next((s for s in part if s not in found), None)
            if missing is not None:
                raise GatewayError("the gateway did not make this session", session_id=missing)
        return found

    async def take(self, session_id: str, url: str | None) -> tuple[Any, BaseException | None]:
        """Close a session and get what was recorded of it, or why that could not be had.

        One call gets all sessions of a gateway that ended meanwhile. A gateway that does not answer holds up only its own.
        """
        url = url if url in self.urls else None
        waiting = self._waiting.setdefault(url, {})
        result: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()
        waiting[session_id] = result
        if url not in self._fetching or self._fetching[url].done():
            self._fetching[url] = asyncio.create_task(self._fetch_waiting(url), name="collect-fetch")
        return await result

    async def _fetch_waiting(self, url: str | None) -> None:
        waiting = self._waiting[url]
        while waiting:
            batch = {session_id: waiting.pop(session_id) for session_id in list(waiting)[:SESSIONS_PER_CALL]}
            captures, failures = await self.fetch(list(batch), url)
            for session_id, result in batch.items():
                if not result.done():
                    result.set_result((captures.get(session_id), failures.get(session_id)))
                await asyncio.sleep(0)  # building trajectories must not hold up records that arrive meanwhile

    async def fetch(
        self, session_ids: Sequence[str], url: str | None = None
    ) -> tuple[dict[str, Any], dict[str, BaseException]]:
        """Close sessions and get what was recorded of them, and for those that could not be had, why.

        Those stay at the gateway when the batch is deleted; not with one of several gateways
        that is lost: should it come back, they are deleted. ``url`` is the gateway that has them, of several.
        """
        if not session_ids:
            return {}, {}

        if url is not None and url in self.lost:
            error = GatewayLostError(f"gateway {url} does not answer", gateway=url, session_ids=session_ids)
            return {}, self._give_up(error)

        async def fetch() -> Any:
            return await self._gateway.fetch_async(session_ids, close=True)

        try:
            return dict(await self._ask(fetch, "hand out trajectories", url)), {}
        except GatewayLostError as e:
            return dict(e.found), self._give_up(e)
        except Exception as e:  # a rollout without its trajectory becomes data; the exception object is kept
            status = e.status if isinstance(e, GatewayError) else 0
            if len(session_ids) > 1 and status not in (*_PASSING, *_REFUSED):
                middle = len(session_ids) // 2
                captures, failures = await self.fetch(session_ids[:middle], url)
                more, others = await self.fetch(session_ids[middle:], url)
                return {**captures, **more}, {**failures, **others}
            self._warnings.warning("fetching %d trajectories failed: %s: %s", len(session_ids), type(e).__name__, e)
            for session_id in session_ids:
                self._made.pop(session_id, None)
            return {}, dict.fromkeys(session_ids, e)

    def _give_up(self, error: GatewayLostError) -> dict[str, BaseException]:
        log.error("%d trajectories are lost with gateway %s: %s", len(error.session_ids), error.gateway, error)
        return dict.fromkeys(error.session_ids, error)

    async def delete(self) -> None:
        """Delete what was made and fetched; a failure is logged, and they stay in the gateway's store."""
        for task in self._fetching.values():
            task.cancel()
        made = list(self._made)
        for start in range(0, len(made), SESSIONS_PER_CALL):
            part = made[start : start + SESSIONS_PER_CALL]
            try:
                async with asyncio.timeout(self._config.gateway_timeout_s):
                    await self._gateway.delete_async(part)
            except Exception as e:  # the data is already here
                log.warning("could not delete %d gateway sessions: %s", len(made) - start, e)
                return

    async def _ask(self, call: Callable[[], Awaitable[Any]], what: str, url: str | None = None) -> Any:
        """Ask until the gateway answers or has been away for `gateway_patience_s`. Raises: what came last."""
        silent_since_s = self._silent_since_s
        limit_s, pause_s = self._config.gateway_timeout_s, FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(limit_s):  # `wait_for` of Python 3.11 may swallow a cancellation
                    answer = await call()
                silent_since_s.pop(url, None)
                return answer
            except (TimeoutError, OSError, GatewayError) as e:
                error: BaseException = e
                if isinstance(e, GatewayError) and e.status not in _PASSING:
                    silent_since_s.pop(url, None)
                    raise
                if isinstance(e, TimeoutError) and not isinstance(e, GatewayError):
                    error = GatewayError(f"the gateway did not {what} within {limit_s:g} s; is it running?")
                    error.__cause__ = e
            silent_s = time.monotonic() - silent_since_s.setdefault(url, began_s)
            if silent_s >= self._config.gateway_patience_s or url in self.lost:
                raise error
            if pause_s == FIRST_PAUSE_S:
                log.warning(
                    "the gateway did not %s (%s); asking again for %g s", what, error, self._config.gateway_patience_s
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
