"""Slots for live sessions, and sessions at the gateway: made, fetched and deleted in bulk, through a restart of the gateway.

All collections of an event loop share them, so a trainer that asks for one rollout at a time makes few calls: during a call,
the sessions of the next call are collected. Sessions are deleted when the last collection ends, or when there are 256.

The collection waits for a gateway that cannot be reached: its store is durable, so its records are there when it is back. If an
answer cannot be read, each half is asked for again, so that a broken session does not affect others. If one of several gateways
stays away for longer, its sessions are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ...errors import GatewayError, GatewayLostError
from ...logs import WarnsOnceAMinute
from .settings import CollectConfig

if TYPE_CHECKING:
    from ...gateway import GatewayClient

log = logging.getLogger(__name__)
T = TypeVar("T")
_Taken = tuple[Any, BaseException | None]  # a session's record, and the reason if it is missing

GATEWAY_LOOK_S = 2.0  # between two checks of several gateways
SESSIONS_PER_CALL = 256  # a bulk reply of 20-turn sessions then has tens of MB
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

# The statuses of a gateway that restarts, also behind a proxy. Any other status would be the same again.
_PASSING = (None, 429, 502, 503, 504)
_REFUSED = (401, 403)


class Places:
    """At most `limit` rollouts at once, on each event loop that uses it (a semaphore cannot serve two)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._per_loop = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    async def __aenter__(self) -> None:
        await self._here().acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._here().release()

    def _here(self) -> asyncio.Semaphore:
        return self._per_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))


class _Joined(Generic[T]):
    """A bulk call for the sessions that arrived during the last call."""

    def __init__(self, call: Callable[[list[str]], Awaitable[Mapping[str, T]]]) -> None:
        self._call = call
        self._waiting: dict[str, asyncio.Future[T]] = {}
        self._task: asyncio.Task[None] | None = None
        self.under_way: frozenset[str] = frozenset()

    async def __call__(self, session_id: str) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[session_id] = result
        if not self.running:
            self._task = asyncio.create_task(self._run(), name="collect-sessions")
        return await result

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # calls that start at the same time join it
            batch = {name: self._waiting.pop(name) for name in list(self._waiting)[:SESSIONS_PER_CALL]}
            self.under_way = frozenset(name for name, result in batch.items() if not result.done())
            try:
                found = await self._call(list(self.under_way)) if self.under_way else {}
            except Exception as e:
                for result in batch.values():
                    if not result.done():
                        result.set_exception(e)
            else:
                for name, result in batch.items():
                    if not result.done():
                        result.set_result(found[name])
                    await asyncio.sleep(0)  # building trajectories must not delay records that arrive meanwhile
            finally:
                self.under_way = frozenset()


class Sessions:
    """The sessions that the collections of an event loop have at ``gateway``. `of` returns the object that they share."""

    _shared: ClassVar[dict[Any, Sessions]] = {}

    def __init__(self, gateway: GatewayClient, config: CollectConfig) -> None:
        self._gateway = gateway
        self._config = config
        found = tuple(getattr(gateway, "urls", ()))
        self.urls: tuple[str, ...] = found if len(found) > 1 else ()  # the gateways, if there are several
        self._warnings = WarnsOnceAMinute(log)
        # The time of the last answer of each gateway that does not answer now.
        self._silent_since_s: dict[str | None, float] = {}
        self._looked_s = 0.0
        self._collections = 0
        self._makes: dict[str, _Joined[Any]] = {}  # keys are sampling parameters
        self._takes: dict[str | None, _Joined[_Taken]] = {}  # keys are gateways
        self._unread: set[str] = set()  # sessions whose records could not be fetched, which stay at the gateway
        self._ended: dict[str, None] = {}  # sessions of ended rollouts, to be deleted

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, gateway: GatewayClient, config: CollectConfig) -> AsyncIterator[Sessions]:
        limits = (config.gateway_timeout_s, config.gateway_patience_s)
        key = (asyncio.get_running_loop(), id(gateway), limits, config.max_turns, config.train)
        shared = cls._shared.setdefault(key, cls(gateway, config))
        shared._collections += 1
        try:
            yield shared
        finally:
            shared._collections -= 1
            if not shared._collections:
                del cls._shared[key]
            leaving = asyncio.ensure_future(shared._leave())
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError:  # the sessions of others depend on it
                await leaving
                raise

    @property
    def lost(self) -> set[str]:
        """Return the gateways that have been away for longer than the patience. A single gateway never counts."""
        away = self._gateway.silent if self.urls else {}
        return {url for url, away_s in away.items() if away_s >= self._config.gateway_patience_s}

    async def look(self) -> None:
        """Check which of several gateways answer, at most once every `GATEWAY_LOOK_S`."""
        if time.monotonic() - self._looked_s < GATEWAY_LOOK_S:
            return
        self._looked_s = time.monotonic()
        try:
            await self._gateway.away_async()
        except (OSError, GatewayError) as e:
            log.warning("the gateways could not be checked: %s", e)

    async def make(self, session_id: str, params: Mapping[str, Any] | None) -> Any:
        """Open a session with these sampling parameters. Returns its address. Raises: GatewayError."""
        config, name = self._config, repr(params)
        options: dict[str, Any] = {"max_turns": config.max_turns, "train": config.train}

        async def made(part: list[str]) -> Mapping[str, Any]:
            # Opening an open session returns the same one, so the request may be repeated after a lost reply.
            handles = await self._ask(
                lambda: self._gateway.create_sessions_async(part, sampling_params=params, **options), "make sessions"
            )
            found = {handle.session_id: handle for handle in handles}
            if missing := set(part) - found.keys():
                raise GatewayError("the gateway did not make this session", session_id=min(missing))
            return found

        if name not in self._makes:  # seeds differ between rollouts: calls that have ended are dropped
            running = {params: joined for params, joined in self._makes.items() if joined.running}
            self._makes = {**running, name: _Joined(made)}
        return await self._makes[name](session_id)

    async def take(self, session_id: str, url: str | None) -> _Taken:
        """Close a session and return its record, or the error that prevented this. ``url`` is that of its gateway.

        A gateway that does not answer delays only its own sessions.
        """
        url = url if url in self.urls else None
        if url not in self._takes:
            self._takes[url] = _Joined(functools.partial(self._fetch, url))
        return await self._takes[url](session_id)

    async def _fetch(self, url: str | None, session_ids: list[str]) -> dict[str, _Taken]:
        try:
            if url in self.lost:
                raise GatewayLostError(f"gateway {url} does not answer", gateway=url, session_ids=session_ids)
            fetched = self._gateway.fetch_async
            found = await self._ask(lambda: fetched(session_ids, close=True), "hand out trajectories", url)
            return {name: (found.get(name), None) for name in session_ids}
        except GatewayLostError as e:
            log.error("%d trajectories are lost with gateway %s: %s", len(e.session_ids), e.gateway, e)
            return {name: (e.found.get(name), e if name in e.session_ids else None) for name in session_ids}
        except Exception as e:  # a rollout without its trajectory becomes data; the exception object is kept
            status = e.status if isinstance(e, GatewayError) else 0
            if len(session_ids) > 1 and status not in (*_PASSING, *_REFUSED):
                middle = len(session_ids) // 2
                parts = session_ids[:middle], session_ids[middle:]
                return {name: taken for part in parts for name, taken in (await self._fetch(url, part)).items()}
            self._warnings.warning("fetching %d trajectories failed: %s: %s", len(session_ids), type(e).__name__, e)
            self._unread.update(session_ids)
            return dict.fromkeys(session_ids, (None, e))

    def end(self, session_ids: Iterable[str]) -> None:
        """Mark the sessions of a collection as ended. They are deleted with those of others, unless they are unread."""
        self._ended |= dict.fromkeys(name for name in session_ids if name not in self._unread)

    async def _leave(self) -> None:
        """End a collection: delete ended sessions if they fill a call, and all with the last collection."""
        if not self._collections:
            for joined in (*self._makes.values(), *self._takes.values()):
                await joined.close()
        elif len(self._ended) < SESSIONS_PER_CALL:
            return
        making = frozenset[str]().union(*(joined.under_way for joined in self._makes.values()))
        names = [name for name in self._ended if name not in making]
        self._ended = dict.fromkeys(name for name in self._ended if name in making)
        try:
            async with asyncio.timeout(self._config.gateway_timeout_s):
                await self._gateway.delete_async(names)
        except Exception as e:  # the data is already here
            log.warning("could not delete %d gateway sessions: %s", len(names), e)

    async def _ask(self, call: Callable[[], Awaitable[Any]], what: str, url: str | None = None) -> Any:
        """Ask until the gateway answers or has been away for `gateway_patience_s`. Raises: the last error."""
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
                    error = GatewayError(f"the gateway did not {what} within {limit_s:g} s: check that it runs")
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
