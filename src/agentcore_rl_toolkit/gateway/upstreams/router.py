"""Chooses the inference server of a call.

A session stays with its server (its prefix cache is there). A new session goes to the server with the fewest running calls,
among equals to the one with the fewest calls so far: else sessions that begin while nothing runs would all go to the first. A
server is judged by its calls, never by a probe: if it refuses connections, or fails several calls in a row, it rests for a while
that doubles up to `MAX_REST_S`. A slow server is busy, not dead. When all servers rest, the one with the shortest rest is tried
anyway: it may be back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from ...errors import ConfigError
from ..config import UpstreamConfig
from ..http.client import request
from .pool import Pool

log = logging.getLogger(__name__)

FIRST_REST_S = 0.25
MAX_REST_S = 10.0
FIRST_WEIGHTS = "default"
FAILURES_IN_A_ROW = 3
_ROUTED = ("sglang", "sglang-experts")


class Worker:
    """One inference server, as the router sees it."""

    def __init__(self, worker_id: str, config: UpstreamConfig, pool: Pool) -> None:
        self.id = worker_id
        self.config = config
        self.pool = pool
        self.inflight = 0
        self.calls = 0
        self.failures = 0
        self.total_failures = 0
        self.draining = False
        self.heads: dict[bytes, bytes] = {}  # of requests, by path: all but the length
        self.resting_until = 0.0
        self.rest_s = 0.0
        self.named = False  # whether it has named its weights by a number
        self.forgot = False  # whether it says, after that, that it has those it was started with
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.host_header = f"{host}:{config.port}".encode()

    def head(self, path: bytes, size: int, session: bytes) -> bytes:
        """Head of a session's request, all but the length and the session kept ready.

        SGLang's router keeps calls of one routing key on one server, where the session's prefix is in the cache.
        """
        known = self.heads.get(path)
        if known is None:
            config = self.config
            lines = [
                b"POST %b HTTP/1.1" % config.path(path),
                b"host: " + self.host_header,
                b"content-type: application/json",
                b"accept: application/json, text/event-stream",
            ]
            if config.api_key is not None:
                lines.append(b"authorization: Bearer " + config.api_key.encode())
            known = self.heads[path] = b"\r\n".join(lines) + b"\r\ncontent-length: "
        if self.config.engine in _ROUTED:
            return b"%b%d\r\nx-smg-routing-key: %b\r\n\r\n" % (known, size, session)
        return b"%b%d\r\n\r\n" % (known, size)

    async def ask(self, path: bytes, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
        """A small request of the gateway's own (GET, or POST with a JSON body). Raises: GatewayError."""
        config, parts = self.config, urlsplit(self.config.url)
        url = f"{parts.scheme}://{parts.netloc}{config.path(path).decode()}"
        method, raw = ("GET", None) if body is None else ("POST", msgspec.Raw(body))
        return await request(method, url, body=raw, key=config.api_key, timeout_s=timeout_s)

    def use(self, config: UpstreamConfig) -> None:
        """Go on with another key at the same address."""
        self.config = self.pool.config = config
        self.heads.clear()
        self.draining = False

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

    def succeeded(self) -> None:
        self.failures = 0
        self.rest_s = 0.0
        self.resting_until = 0.0

    def failed(self, now: float, *, unreachable: bool, why: str) -> None:
        """Count a failed call. `unreachable`: no connection, or it broke; otherwise the server answered with a 5xx.

        ``why`` is for the log, which alone names the server: agents do not learn its address.
        """
        self.failures += 1
        self.total_failures += 1
        if unreachable or self.failures >= FAILURES_IN_A_ROW:
            if now >= self.resting_until:  # once, however many calls it fails at the same time
                log.warning("inference server %s is left alone for a while: %s", self.config.url, why)
            self.rest_s = min(MAX_REST_S, self.rest_s * 2 or FIRST_REST_S)
            self.resting_until = now + self.rest_s


class Router:
    """The set of servers. Raises: ConfigError on a URL that is already there."""

    def __init__(self, upstreams: Iterable[UpstreamConfig], *, connect_s: float) -> None:
        self.workers: dict[str, Worker] = {}
        self._connect_s = connect_s
        self._count = 0
        for upstream in upstreams:
            self.add(upstream, upstream.worker_id)

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
        worker = self.workers[worker_id] = Worker(worker_id, upstream, Pool(upstream, connect_s=self._connect_s))
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

    def sweep(self, now: float) -> None:
        for worker in list(self.workers.values()):
            worker.pool.sweep(now)
            self._remove_if_done(worker)

    def _remove_if_done(self, worker: Worker) -> None:
        if worker.draining and not worker.inflight:
            del self.workers[worker.id]
            worker.pool.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.pool.close()
