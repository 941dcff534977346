"""Chooses the inference server of a call, sends the call there, and moves it to another server when that one fails.

A session stays with its server (its prefix cache is there). A new session goes to the server with the fewest running calls,
among equals to the one with the fewest calls so far: otherwise sessions that begin while nothing runs would all go to the first.
A server is judged by its calls, never by a probe: if it refuses connections, or fails several calls in a row, it rests for a
while that doubles up to `MAX_REST_S`. A slow server is busy, not dead. When all servers rest, the one with the shortest rest is
tried anyway: it may be back.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from socket import socket
from typing import Any

import aiohttp
from yarl import URL

from ...errors import ConfigError, GatewayError
from ...messages.errors import RequestError
from ..config import Limits, UpstreamConfig
from ..http.connection import keep_alive

log = logging.getLogger(__name__)

FIRST_REST_S = 0.25
MAX_REST_S = 10.0
IDLE_S = 4.0  # uvicorn closes idle connections after 5 s; a call sent into that moment would have to be repeated
FIRST_WEIGHTS = "default"
FAILURES_IN_A_ROW = 3
_ROUTED = ("sglang", "sglang-experts")
_LARGE = 2**20  # aiohttp copies larger bodies in pieces, without a warning, if they are files
BROKEN_OFF = "the inference server closed the connection before its reply was whole"
UNREACHABLE = "the inference server cannot be reached"

_opened: ContextVar[list[bool]] = ContextVar("opened")  # filled if the request in this context opens a connection


class ServerLostError(GatewayError):
    """A server gave no whole reply. The message is for the agent. ``refused``: no connection could be made."""

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
    family, kind, protocol, _, _ = address
    made = socket(family, kind, protocol)
    made.setblocking(False)
    keep_alive(made)
    if (opened := _opened.get(None)) is not None:
        opened.append(True)
    return made


class Worker:
    """One inference server, as the router sees it."""

    def __init__(self, worker_id: str, config: UpstreamConfig, router: Router) -> None:
        self.id = worker_id
        self._router = router
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if config.tls else True
        self.inflight = 0
        self.calls = 0
        self.failures = 0
        self.total_failures = 0
        self.draining = False
        self.resting_until = 0.0
        self.rest_s = 0.0
        self.named = False  # whether it has named its weights by a number
        self.forgot = False  # whether it reports, after that, the weights it was started with
        self.use(config)

    def use(self, config: UpstreamConfig) -> None:
        """Continue with another key at the same address."""
        self.config = config
        self.draining = False
        self._urls: dict[bytes, URL] = {}
        self._headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if config.api_key is not None:
            self._headers["authorization"] = f"Bearer {config.api_key}"

    def _url(self, path: bytes) -> URL:
        url = self._urls.get(path)
        if url is None:
            config = self.config
            host = f"[{config.host}]" if ":" in config.host else config.host
            scheme = "https" if config.tls else "http"
            text = f"{scheme}://{host}:{config.port}{config.path(path).decode()}"
            url = self._urls[path] = URL(text, encoded=True)
        return url

    @asynccontextmanager
    async def post(
        self, path: bytes, body: bytes, *, session: str, stream: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a model call. The reply is read inside the block, and leaving the block early ends the call at the server.

        SGLang's router keeps calls of one routing key on one server, where the session's prefix is in the cache.
        Raises: ServerLostError, also inside the block; RequestError when the process has no file descriptor left.
        """
        limits = self._router.limits
        headers = self._headers
        if self.config.engine in _ROUTED:
            headers = {**headers, "x-smg-routing-key": session}
        timeout = self._router.stream_timeout if stream else self._router.timeout
        try:
            response = await self._sent(path, body, headers, timeout)
            try:
                with _watched(response):
                    yield response
            finally:
                response.release()
        except aiohttp.SocketTimeoutError as e:
            raise ServerLostError(f"the inference server sent nothing for {limits.stream_idle_s:g} s") from e
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            if getattr(e, "errno", None) in (errno.EMFILE, errno.ENFILE):
                why = "the gateway has no connection left for this call: raise `ulimit -n`"
                raise RequestError(why, kind="overloaded") from e
            raise ServerLostError(UNREACHABLE, refused=True) from e
        except aiohttp.ClientError as e:
            raise ServerLostError(BROKEN_OFF) from e

    async def _sent(
        self, path: bytes, body: bytes, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """The response's head. A server may close a kept connection just when it is used, and has not seen the request then."""
        opened: list[bool] = []
        _opened.set(opened)
        while True:
            try:
                return await self._router.http.post(
                    self._url(path),
                    data=body if len(body) < _LARGE else io.BytesIO(body),
                    headers=headers,
                    timeout=timeout,
                    ssl=self._tls,
                    allow_redirects=False,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as e:
                if opened or self.draining or isinstance(e, aiohttp.ClientConnectorError):
                    raise

    async def ask(self, path: bytes, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
        """A small request of the gateway's own (GET, or POST with a JSON body). Raises: GatewayError."""
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._router.http.request(
                method,
                self._url(path),
                data=body,
                headers=self._headers,
                timeout=timeout,
                ssl=self._tls,
                allow_redirects=False,
            ) as response:
                return response.status, await response.read()
        except TimeoutError as e:
            raise GatewayError(f"{method} {self._url(path)}: no answer within {timeout_s} s") from e
        except aiohttp.ClientError as e:
            raise GatewayError(f"{method} {self._url(path)}: {str(e) or repr(e)}") from e

    def says(self, version: str | int | None) -> None:
        """The engine's own name of its weights; vLLM calls those it was started with "default"."""
        if version is not None and str(version).isdigit():
            self.named, self.forgot = True, False
        elif self.named and not self.forgot and version == FIRST_WEIGHTS:
            self.forgot = True
            log.error(
                "inference server %s was started again: it has its first weights, not the published ones. Its turns are not "
                "trained until weights are published again",
                self.config.url,
            )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a call of this server, and how it ends."""
        self.inflight += 1
        self.calls += 1
        try:
            yield
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
        self.rest_s = 0.0
        self.resting_until = 0.0

    def failed(self, *, unreachable: bool, why: str) -> None:
        """Count a failed call. `unreachable`: no connection, or it broke; otherwise the server answered with a 5xx.

        ``why`` is for the log, which alone names the server: agents do not learn its address.
        """
        now = time.monotonic()
        self.failures += 1
        self.total_failures += 1
        if unreachable or self.failures >= FAILURES_IN_A_ROW:
            if now >= self.resting_until:  # once, however many calls it fails at the same time
                log.warning("inference server %s is left alone for a while: %s", self.config.url, why)
            self.rest_s = min(MAX_REST_S, self.rest_s * 2 or FIRST_REST_S)
            self.resting_until = now + self.rest_s


class Router:
    """The set of servers, and the connections to them. Raises: ConfigError on a URL that is already there."""

    def __init__(self, upstreams: Iterable[UpstreamConfig], limits: Limits) -> None:
        self.limits = limits
        self.timeout = aiohttp.ClientTimeout(total=None, connect=limits.connect_s)
        self.stream_timeout = aiohttp.ClientTimeout(
            total=None, connect=limits.connect_s, sock_read=limits.stream_idle_s
        )
        self.workers: dict[str, Worker] = {}
        self.http: aiohttp.ClientSession
        self._count = 0
        for upstream in upstreams:
            self.add(upstream, upstream.worker_id)

    def start(self) -> None:
        """Make connections possible. Call it in the event loop."""
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept-encoding", "user-agent"),
            auto_decompress=False,
            read_bufsize=2**18,
        )

    def add(self, upstream: UpstreamConfig, worker_id: str | None = None) -> Worker:
        """Add a server; one with the same URL goes on as `upstream` says (and is taken out of draining)."""
        known = self.at(upstream.url)
        if known is not None:
            known.use(upstream)
            return known
        if worker_id is None:
            while f"w{self._count}" in self.workers:  # a server was added under this name
                self._count += 1
            worker_id = f"w{self._count}"
        if worker_id in self.workers:
            raise ConfigError(f"there is another upstream with id {worker_id}")
        self._count += 1
        worker = self.workers[worker_id] = Worker(worker_id, upstream, self)
        return worker

    def at(self, url: str) -> Worker | None:
        """The server with this URL."""
        return next((w for w in self.workers.values() if w.config.url.rstrip("/") == url.rstrip("/")), None)

    def drain(self, worker_id: str) -> Worker | None:
        """Give a server no further calls. It is removed at once, or by `sweep` when its running ones are done."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.draining = True
            self._remove_if_done(worker)
        return worker

    def pick(self, stuck_to: Worker | None, tried: tuple[Worker, ...] = ()) -> Worker | None:
        """The server for the next call of a session that is at `stuck_to`, leaving out those already tried.

        None: there is none.
        """
        if stuck_to is not None and not stuck_to.draining and not stuck_to.resting_until and stuck_to not in tried:
            return stuck_to
        now = time.monotonic()
        free = [w for w in self.workers.values() if not w.draining and w not in tried]
        if stuck_to in free and stuck_to.resting_until <= now:
            return stuck_to

        def rank(worker: Worker) -> tuple[bool, float, float]:
            resting = worker.resting_until > now
            return resting, worker.resting_until if resting else worker.inflight, worker.calls

        return min(free, key=rank, default=None)

    def sweep(self) -> None:
        """Remove drained servers whose calls are done."""
        for worker in list(self.workers.values()):
            self._remove_if_done(worker)

    def _remove_if_done(self, worker: Worker) -> None:
        if worker.draining and not worker.inflight:
            del self.workers[worker.id]

    async def close(self) -> None:
        await self.http.close()


@contextmanager
def _watched(response: aiohttp.ClientResponse) -> Iterator[None]:
    """End the reading of a response whose connection is closed. aiohttp 3.14 lets the reader wait when a chunk is no HTTP."""
    closed = None if response.connection is None else response.connection.protocol.closed  # type: ignore[union-attr]

    def end(closed: asyncio.Future[None]) -> None:
        closed.exception()
        if not response.content.is_eof():
            response.content.set_exception(aiohttp.ClientPayloadError("the response is not complete"))

    if closed is not None:
        closed.add_done_callback(end)
    try:
        yield
    finally:
        if closed is not None:
            closed.remove_done_callback(end)


async def checked(response: aiohttp.ClientResponse, most: int) -> aiohttp.ClientResponse:
    """The response, if its status is 200. Raises: StatusError, with its body."""
    if response.status != 200:
        raise StatusError(response.status, response.headers, await whole(response, most))
    return response


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body of a response. Raises: RequestError when it is larger than ``most`` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most:
            raise too_large(most)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(most: int) -> RequestError:
    return RequestError(f"the reply is larger than {most} bytes (setting reply_bytes)", kind="upstream")
