"""The engines: which of them takes a call, connections to them, outages, and pauses for new weights.

A session stays with its server, whose prefix cache has its prompt. A new session goes to the server with the fewest running
calls, among equals to the one with the fewest calls so far. A server is judged by its calls: if it refuses connections, or fails
several calls in a row, it rests for a while that doubles up to `MAX_REST_S`. A slow server is busy, not dead. When all servers
rest, the server with the shortest rest is tried.

With `Limits.outage_s` calls wait while all servers are down, and the gateway probes the servers. A restarted server has the
weights of its start, not the published weights. vLLM and SGLang report this: their version was a number and becomes "default".
The turns of such a server are not trained until weights are published again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import io
import itertools
import logging
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from socket import socket
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from .._servers.tasks import Tasks
from ..errors import ConfigError, GatewayError
from ..messages.errors import NOT_JSON, RequestError
from .capture.choice import version_of
from .config import Limits, UpstreamConfig
from .http.server import keep_alive

log = logging.getLogger(__name__)

FIRST_REST_S = 0.25
MAX_REST_S = 10.0
FAILURES_IN_A_ROW = 3
IDLE_S = 4.0  # uvicorn closes idle connections after 5 s; a call at that moment would have to be repeated
STALE_S = 1.0  # a connection that ends later after a request was not stale: the server may have begun the call
PROBE_EVERY_S = 1.0
PROBE_S = 5.0
_WEIGHTS = {"vllm": b"/weight_info", "sglang": b"/model_info", "sglang-experts": b"/model_info"}
_FIRST_WEIGHTS = "default"  # vLLM's and SGLang's version of the weights at the start of a server
_LARGE = 2**20  # aiohttp copies larger bodies in pieces, without a warning, if they are files
BROKEN_OFF = "the engine closed the connection before its reply was whole"
UNREACHABLE = "the engine cannot be reached"

_opened: ContextVar[list[bool]] = ContextVar("opened")  # filled if the request in this context opens a connection


class ServerLostError(GatewayError):
    """A server did not send a complete reply. The message is for the agent. ``refused``: no connection could be made."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class StatusError(GatewayError):
    """A server answered with an error."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"it answered {status} several times in a row", status=status)
        self.http_status = status
        self.headers = headers
        self.body = body


def _socket(address: Any) -> socket:
    """Make the socket of a connection to a server (`aiohttp.TCPConnector`)."""
    made = socket(*address[:3])
    made.setblocking(False)
    keep_alive(made)
    if (opened := _opened.get(None)) is not None:
        opened.append(True)
    return made


class Worker:
    """An engine. ``forgot``: it reports the weights of its start after it had reported a version."""

    def __init__(self, worker_id: str, config: UpstreamConfig, router: Router) -> None:
        self.id = worker_id
        self._router = router
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if config.url.startswith("https:") else True
        self.inflight = 0
        self.calls = 0
        self.failures = 0
        self.total_failures = 0
        self.resting_until = 0.0
        self.rest_s = 0.0
        self._named = False  # whether it has reported a version
        self.forgot = False
        self.use(config)

    def use(self, config: UpstreamConfig) -> None:
        """Use another key at the same address."""
        self.config = config
        self.draining = False
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if config.api_key is not None:
            self._headers["authorization"] = f"Bearer {config.api_key}"
        self._url = functools.cache(lambda path: URL(config.url_of(path.decode()), encoded=True))

    async def post(self, path: bytes, body: bytes, *, session: str, stream: bool) -> aiohttp.ClientResponse:
        """Send a model call. Returns the reply, of which only the head was read; `release` it before its end to end the call.

        SGLang's router keeps calls of one routing key on one server, where the session's prefix is in the cache. A server may
        close an idle connection before it reads the request, which is then sent again. Raises: aiohttp.ClientError.
        """
        router, headers = self._router, self._headers
        timeout = router.stream_timeout if stream else router.timeout
        if self.config.engine.startswith("sglang"):
            headers = {**headers, "x-smg-routing-key": session}
        opened: list[bool] = []
        _opened.set(opened)
        while True:
            data, sent_s = body if len(body) < _LARGE else io.BytesIO(body), time.monotonic()
            try:
                return await router.http.post(
                    self._url(path), data=data, headers=headers, timeout=timeout, ssl=self._tls, allow_redirects=False
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as e:
                # Without an error number, the connection ended before the request was written.
                unsent = isinstance(e, aiohttp.ClientOSError) and e.errno is None
                stale = not opened and (unsent or time.monotonic() - sent_s < STALE_S)
                if not stale or self.draining or isinstance(e, aiohttp.ClientConnectorError):
                    raise

    async def ask(self, path: bytes, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
        """Send a small request of the gateway itself: GET, or POST with a JSON body. Raises: GatewayError."""
        method, url = "GET" if body is None else "POST", self._url(path)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._router.http.request(
                method, url, data=body, headers=self._headers, timeout=timeout, ssl=self._tls, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except TimeoutError as e:
            raise GatewayError(f"{method} {url}: no answer within {timeout_s} s") from e
        except aiohttp.ClientError as e:
            raise GatewayError(f"{method} {url}: {str(e) or repr(e)}") from e

    def error_of(self, error: aiohttp.ClientError) -> ServerLostError | RequestError:
        """Return the error for a call that was not answered: a RequestError if the process has no file descriptor left."""
        if isinstance(error, aiohttp.SocketTimeoutError):
            return ServerLostError(f"the engine sent nothing for {self._router.limits.stream_idle_s:g} s")
        if not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return ServerLostError(BROKEN_OFF)
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            why = "the gateway has no connection left for this call: raise `ulimit -n`"
            return RequestError(why, kind="overloaded")
        return ServerLostError(UNREACHABLE, refused=True)

    def report_weights(self, version: str | int | None) -> None:
        """Handle the weight version that the engine reports."""
        if version_of(version) is not None:
            self._named, self.forgot = True, False
        elif self._named and not self.forgot and version == _FIRST_WEIGHTS:
            self.forgot = True
            log.error(
                "engine %s was restarted: it has its first weights, not the published ones. Its turns are not "
                "trained until weights are published again",
                self.config.url,
            )

    async def ask_weights(self) -> None:
        """Ask the server for its weight version. If it is down or has no such route, nothing changes."""
        route = _WEIGHTS.get(self.config.engine)
        if route is None:
            return
        with suppress(GatewayError, KeyError, *NOT_JSON):
            status, body = await self.ask(route, timeout_s=PROBE_S)
            if status == 200:
                self.report_weights(msgspec.json.decode(body, type=dict[str, Any])["weight_version"])

    async def probe(self) -> None:
        """Probe the server. If it is up, it takes calls again."""
        with suppress(GatewayError):
            status, _ = await self.ask(b"/health", timeout_s=PROBE_S)
            if status < 500:  # every server that answers is up: plain endpoints do not have this route
                await self.ask_weights()
                self.succeeded()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the call that the block makes, and its result."""
        self.inflight += 1
        self.calls += 1
        try:
            yield
            if self.failures:
                self.succeeded()
        except StatusError as e:
            if e.http_status >= 500:
                self.failed(unreachable=False, why=str(e))
            raise
        except ServerLostError as e:
            self.failed(unreachable=True, why=str(e.__cause__ or e))
            raise
        finally:
            self.inflight -= 1

    def succeeded(self) -> None:
        self.failures = 0
        self.rest_s = self.resting_until = 0.0

    def failed(self, *, unreachable: bool, why: str) -> None:
        """Count a failed call. ``unreachable``: no connection, or it broke; otherwise the server answered with a 5xx.

        ``why`` is for the log. Only the log has the server's address: agents do not get it.
        """
        now = time.monotonic()
        self.failures += 1
        self.total_failures += 1
        if unreachable or self.failures >= FAILURES_IN_A_ROW:
            if now >= self.resting_until:  # once for all calls that fail at the same time
                log.warning("engine %s gets no calls for a while: %s", self.config.url, why)
            self.rest_s = min(MAX_REST_S, self.rest_s * 2 or FIRST_REST_S)
            self.resting_until = now + self.rest_s


class Router:
    """The set of servers. ``waiting`` counts the calls that wait for a server to come up.

    Raises: ConfigError on a URL that is already there.
    """

    def __init__(self, upstreams: Iterable[UpstreamConfig], limits: Limits) -> None:
        self.limits = limits
        self.timeout = aiohttp.ClientTimeout(total=None, connect=limits.connect_s)
        self.stream_timeout = aiohttp.ClientTimeout(
            total=None, connect=limits.connect_s, sock_read=limits.stream_idle_s
        )
        self.workers: dict[str, Worker] = {}
        self.http: aiohttp.ClientSession
        self.waiting = 0
        self._probing = asyncio.Lock()
        self._tasks = Tasks()
        self._numbers = itertools.count()
        for upstream in upstreams:
            self.add(upstream)

    def start(self) -> None:
        """Open the pool of connections. Call it in the event loop."""
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept-encoding", "user-agent"),
            auto_decompress=False,
            read_bufsize=2**18,
        )
        self.ask_weights()

    async def close(self) -> None:
        await self._tasks.cancel()
        await self.http.close()

    def add(self, upstream: UpstreamConfig) -> Worker:
        """Add a server. A known server with this URL gets these settings and takes calls again. It keeps its key."""
        for known in self.workers.values():
            if known.config.url.rstrip("/") == upstream.url.rstrip("/"):
                known.use(dataclasses.replace(upstream, api_key=upstream.api_key or known.config.api_key))
                return known
        worker_id = upstream.worker_id or f"w{next(self._numbers)}"
        if worker_id in self.workers:
            raise ConfigError(f"there is another upstream with id {worker_id}")
        worker = self.workers[worker_id] = Worker(worker_id, upstream, self)
        return worker

    def drain(self, worker_id: str) -> Worker | None:
        """Send a server no further calls. `sweep` removes it when its running calls have ended."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.draining = True
            self.sweep()
        return worker

    def sweep(self) -> None:
        """Remove drained servers whose calls are done."""
        for worker in list(self.workers.values()):
            if worker.draining and not worker.inflight:
                del self.workers[worker.id]

    def pick(self, stuck_to: Worker | None, tried: Collection[Worker] = ()) -> Worker | None:
        """Return the server for the next call of a session that is at `stuck_to`, leaving out those already tried."""
        now = time.monotonic()
        free = [w for w in self.workers.values() if not w.draining and w not in tried]
        if stuck_to is not None and stuck_to in free and stuck_to.resting_until <= now:
            return stuck_to

        def rank(worker: Worker) -> tuple[bool, float, float]:
            resting = worker.resting_until > now
            return resting, worker.resting_until if resting else worker.inflight, worker.calls

        return min(free, key=rank, default=None)

    # -- outages

    @property
    def problem(self) -> str | None:
        """Return a message for the operator; None when all is well."""
        workers = self.workers.values()
        if workers and all(worker.resting_until for worker in workers):
            return "all engines are down"
        if any(worker.forgot for worker in workers):
            return "an engine was restarted and does not have the published weights"
        return None

    @property
    def is_down(self) -> bool:
        """Return True if all servers are down, so that a call should wait. A busy server is not down."""
        workers = [worker for worker in self.workers.values() if not worker.draining]
        return bool(self.limits.outage_s) and all(worker.resting_until for worker in workers)

    async def wait_until_up(self, until: float) -> None:
        """Return when a server is back. ``until`` is a time of `time.monotonic`, as on the event loop. Raises: RequestError."""
        self.waiting += 1
        try:
            async with asyncio.timeout_at(until), self._probing:  # one call probes for all
                if self.is_down:
                    log.warning("all engines are down: calls wait for up to %g s", self.limits.outage_s)
                while self.is_down:
                    await asyncio.sleep(min(PROBE_EVERY_S, self.limits.outage_s))
                    await asyncio.gather(*(worker.probe() for worker in self.workers.values()))
        except TimeoutError:
            why = f"all engines have been down for {self.limits.outage_s:g} s; try again later"
            raise RequestError(why, kind="overloaded") from None
        finally:
            self.waiting -= 1

    def ask_weights(self) -> None:
        """Ask all servers for their weight version, at the start and after weights were published."""
        for worker in self.workers.values() if self.limits.outage_s else ():
            self._tasks.start(worker.ask_weights())


class RunningCalls:
    """The running calls (`Call`) of a gateway. ``waiting`` are those that a pause holds."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.calls: set[Any] = set()
        self.waiting: set[Any] = set()
        self.paused = False
        self.weight_version: int | None = None
        self._resumed = asyncio.Event()
        self._change = asyncio.Event()  # set, and replaced, when a call waits or ends, and when a pause ends

    def discard(self, call: Any) -> None:
        """Remove a call that has ended."""
        self.calls.discard(call)
        self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, reached: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until `reached()`, but not longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not reached():
                    await self._change.wait()

    async def resumed(self, call: Any) -> None:
        """Hold a call that arrives during a pause. Its time limit begins when the pause ends."""
        with self.held(call, self.limits.hold_s):
            await self._resumed.wait()

    @contextmanager
    def held(self, call: Any, limit_s: float | None) -> Iterator[None]:
        """Hold a call inside the block: no server works on it, so a pause does not wait for it."""
        call.enter("held", limit_s)
        self.waiting.add(call)
        self._changed()
        try:
            yield
        finally:
            self.waiting.discard(call)
        call.enter("sampling", self.limits.call_s)

    @property
    def _active(self) -> int:
        return len(self.calls) - len(self.waiting)

    async def pause(self, *, in_flight: str = "finish", timeout_s: float = 60.0) -> dict[str, Any]:
        """Start no further calls, and return how many still run at the end of the wait.

        `in_flight`: "finish" waits for the running calls, "abort" ends them, "continue" does not change them.
        """
        self.paused = True
        self._resumed.clear()
        if in_flight == "abort":
            for call in self.calls - self.waiting:
                call.abort(RequestError("the policy is being updated; try again", kind="overloaded"))
        if in_flight != "continue":  # an aborted call continues if its record is being stored
            await self.until(lambda: not self._active or not self.paused, timeout_s)
        return {"paused": True, "in_flight": self._active}

    def resume(self) -> dict[str, Any]:
        self.paused = False
        started = len(self.waiting)
        self._resumed.set()
        self._changed()
        return {"paused": False, "started": started}
