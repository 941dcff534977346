"""The gateway's own session at a Tinker service: opened at the first call, kept alive, one sampler per set of weights.

A sampler (the service says "sampling session") stands for fixed weights, so the version of a turn is that of the
sampler it was asked from. New weights are a new sampler; calls that already run end on the old one.

Source: the `tinker` package 0.38.0 (lib/internal_client_holder.py, lib/_jwt_auth.py).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ...messages.errors import NOT_JSON, RequestError
from ..config import GatewayConfig
from ..engines import tinker as wire
from ..engines.errors import upstream_error
from ..upstreams.requests import post
from ..upstreams.router import Router, Worker

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0  # the SDK's own; the service ends a session that is silent for some minutes
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two tries while the service is in trouble
USER_AGENT = b"user-agent: agentcore-rl-toolkit"  # firewalls on the way refuse requests without one
_TIMEOUT_S = 30.0
_encode = msgspec.json.Encoder().encode


class ServiceError(RequestError):
    """A request outside model calls failed. The message names the service, for logs and trainers; ``to_agent`` does not."""

    def __init__(self, message: str = "", *, to_agent: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self._to_agent = to_agent

    def to_agent(self) -> RequestError:
        """The same for an agent, which does not learn where the service is, nor what it says of weights and sessions."""
        return RequestError(self._to_agent, kind=self.kind, status=self.status)


class UnavailableError(ServiceError):
    """The service cannot be reached or has too much to do: the same request may be answered in a moment."""


class Sampler:
    """Where to sample one set of weights. ``places`` numbers its requests: the service knows a repeated one by that."""

    __slots__ = ("id", "model", "places", "version")

    def __init__(self, sampler_id: str, model: str, version: int | None, places: Iterator[int] | None = None) -> None:
        self.id = sampler_id
        self.model = model
        self.version = version
        self.places = places if places is not None else itertools.count()


class TinkerService:
    """Our session at one service."""

    def __init__(self, worker: Worker, services: TinkerServices) -> None:
        self.worker = worker
        self.sampler: Sampler | None = None
        self.quiet_until = 0.0  # by the monotonic clock: it answered a call that it is overloaded
        self._services = services
        self._token = worker.config.api_key or ""
        self._token_renewal_s = float("inf")
        self._exchange = False
        self._cancels = False
        self._config_due_s = 0.0
        self._session: str | None = None
        self._places = itertools.count()
        self._opening: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def head(self, path: bytes, size: int, *more: bytes) -> bytes:
        """Head of a model call's request."""
        config = self.worker.config
        lines = [
            b"POST %b HTTP/1.1" % config.path(path),
            b"host: " + self.worker.host_header,
            USER_AGENT,
            b"content-type: application/json",
            b"x-api-key: " + self._token.encode(),
            *more,
            b"content-length: %d\r\n\r\n" % size,
        ]
        return b"\r\n".join(lines)

    # -- opening

    def opening(self) -> asyncio.Task[None]:
        """The task that gets a sampler; one for all calls that wait for it. It ends with a RequestError or not at all."""
        if self._opening is None or self._opening.done():
            self._opening = self._task(self._open())
        return self._opening

    async def _open(self) -> None:
        while (wanted := self._services.wanted) is not None:
            try:
                made = await self.make(*wanted)
            except ServiceError as e:
                log.warning("no sampler for %s: %s", wanted[0], e)
                raise e.to_agent() from e
            if wanted == self._services.wanted:  # or others were published meanwhile
                self.sampler = made
                return
        raise RequestError(
            "the gateway has no weights to sample from yet: give --sampler, or publish some (set_weight_version)",
            kind="overloaded",
        )

    async def make(self, model: str, version: int | None) -> Sampler:
        """A sampler for a ``tinker://`` path or a base model; a service in trouble is waited for. Raises: RequestError."""
        give_up_s = time.monotonic() + self._services.patience_s
        pause_s, renewed = FIRST_PAUSE_S, False
        while True:
            try:
                return await self._make(model, version)
            except UnavailableError:
                if time.monotonic() >= give_up_s:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            except RequestError as e:
                if e.status != 410 or renewed:
                    raise
                self._session, renewed = None, True  # it had ended our session, without our knowing

    async def _make(self, model: str, version: int | None) -> Sampler:
        await self._have_session()
        body: dict[str, Any] = {
            "session_id": self._session,
            "sampling_session_seq_id": next(self._places),
            "type": "create_sampling_session",
        }
        body["model_path" if model.startswith("tinker://") else "base_model"] = model
        answer = await self.ask(wire.CREATE_SAMPLER, body)
        return Sampler(str(answer["sampling_session_id"]), model, version)

    async def _have_session(self) -> None:
        if self._session is not None:
            return
        config = await self.ask(wire.CONFIG, {"sdk_version": wire.SDK_VERSION})
        self._exchange = bool(config.get("pjwt_auth_enabled"))
        await self.renew_token()
        await self._read_flags()
        body = {"tags": [], "user_metadata": {}, "sdk_version": wire.SDK_VERSION, "type": "create_session"}
        answer = await self.ask(wire.CREATE_SESSION, body)
        for kind in ("info_message", "warning_message", "error_message"):
            if answer.get(kind):
                log.warning("%s says: %s", self.worker.config.url, answer[kind])
        self._session = str(answer["session_id"])
        if self._beating is None or self._beating.done():
            self._beating = self._task(self._beat())

    async def renew_token(self) -> None:
        """Exchange the key for a short-lived token where the service wants that. Raises: RequestError."""
        if not self._exchange:
            return
        self._token = self.worker.config.api_key or ""
        self._token = str((await self.ask(wire.AUTH_TOKEN, {}))["jwt"])
        self._token_renewal_s = time.time() + _lifetime_s(self._token) / 2

    def renewing(self) -> asyncio.Task[None]:
        """`renew_token` as a task, for calls whose token was refused."""
        return self._task(self._renew_for_call())

    async def _renew_for_call(self) -> None:
        try:
            await self.renew_token()
        except ServiceError as e:
            log.warning("no token: %s", e)
            raise e.to_agent() from e

    async def _read_flags(self) -> None:
        """Flags that may change while we run. A service without that route has the defaults."""
        self._config_due_s = time.monotonic() + 300.0
        try:
            flags = await self.ask(wire.DYNAMIC_CONFIG, {"sdk_version": wire.SDK_VERSION})
        except RequestError as e:
            if e.status != 404:
                log.warning("%s: no flags: %s", self.worker.config.url, e)
            return
        self._cancels = bool(flags.get("sample_cancel_enabled"))
        self._config_due_s = time.monotonic() + max(10.0, float(flags.get("refresh_interval_sec") or 300))

    async def _beat(self) -> None:
        while self._session is not None:
            await asyncio.sleep(HEARTBEAT_S)
            if not self._services.serves(self):
                await self._finish()
                return
            try:
                if time.time() > self._token_renewal_s:
                    await self.renew_token()
                if time.monotonic() > self._config_due_s:
                    await self._read_flags()
                await self.ask(wire.HEARTBEAT, {"session_id": self._session, "type": "session_heartbeat"})
            except RequestError as e:
                if e.status in (404, 410):
                    log.warning("%s ended our session; the next call opens another", self.worker.config.url)
                    self._session = self.sampler = None
                else:
                    log.warning("%s: heartbeat failed: %s", self.worker.config.url, e)

    def lost(self, sampler: Sampler) -> None:
        """The service does not know a sampler of ours any more: start afresh, unless somebody already has."""
        if self.sampler is sampler:
            self._session = self.sampler = None

    # -- asking

    async def ask(self, path: bytes, body: dict[str, Any]) -> dict[str, Any]:
        """One request outside model calls. Raises: ServiceError."""
        where = f"{self.worker.config.url} {path.decode()}"
        try:
            status, answer = await post(
                self.worker,
                path,
                _encode(body),
                timeout_s=_TIMEOUT_S,
                headers=[USER_AGENT, b"accept: application/json", b"x-api-key: " + self._token.encode()],
            )
        except (OSError, TimeoutError) as e:
            to_agent = "the inference server cannot be reached"
            raise UnavailableError(f"{where} cannot be reached: {e}", to_agent=to_agent, kind="upstream") from e
        if status >= 400:
            error = upstream_error(status, answer)
            to_agent = f"the inference server answered {status} when the gateway prepared this call"
            if status in (401, 403):
                to_agent = error.message  # our own words
            known: dict[str, Any] = {"to_agent": to_agent, "kind": error.kind}
            if status in (408, 409, 429) or status >= 500:
                raise UnavailableError(f"{where}: {error}", status=status, **known)
            raise ServiceError(f"{where}: {error}", status=status if status != 401 else 502, **known)
        try:
            decoded = msgspec.json.decode(answer or b"{}")
        except NOT_JSON as e:
            to_agent = "the inference server's answer is not JSON"
            raise ServiceError(f"{where}: the answer is not JSON: {e}", to_agent=to_agent, kind="upstream") from e
        return decoded if isinstance(decoded, dict) else {}

    def cancel(self, request_id: str) -> None:
        """Stop sampling that nobody waits for any more, where the service lets us."""
        if self._cancels:
            self._task(self._cancel(request_id))

    async def _cancel(self, request_id: str) -> None:
        try:
            await self.ask(wire.CANCEL, {"request_id": request_id})
        except RequestError as e:
            log.info("cancelling %s: %s", request_id, e)

    async def close(self) -> None:
        """End the session, so that the service keeps nothing for us."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._finish()

    async def _finish(self) -> None:
        session, self._session, self.sampler = self._session, None, None
        if session is not None:
            with contextlib.suppress(RequestError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self.ask(f"/api/v1/sessions/{session}/finish".encode(), {"reason": {"type": "success"}})

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RequestError):
            log.error("%s: %r", self.worker.config.url, error)


class TinkerServices:
    """All services of a gateway, and the weights they sample. ``wanted`` is the model and its version."""

    def __init__(self, router: Router, config: GatewayConfig) -> None:
        self._router = router
        self._of: dict[str, TinkerService] = {}
        self.patience_s = config.limits.patience_s
        self.wanted: tuple[str, int | None] | None = None
        if config.sampler is not None:
            self.wanted = (config.sampler, config.weight_version)

    def of(self, worker: Worker) -> TinkerService:
        known = self._of.get(worker.id)
        if known is None or known.worker is not worker:
            known = self._of[worker.id] = TinkerService(worker, self)
        return known

    def serves(self, service: TinkerService) -> bool:
        """Whether its server is still one of the gateway's. One that was removed is forgotten."""
        worker = service.worker
        if self._router.workers.get(worker.id) is worker:
            return True
        if self._of.get(worker.id) is service:
            del self._of[worker.id]
        return False

    def models(self) -> list[str]:
        """What is sampled now."""
        return [self.wanted[0]] if self.wanted is not None else []

    async def use(self, model: str | None, version: int) -> None:
        """Let all further calls sample ``model`` as ``version``; None keeps the weights and renames their version.

        Raises: RequestError; every service then goes on with what it had.
        """
        services = [self.of(w) for w in self._router.workers.values() if not w.draining]
        if model is None:
            if self.wanted is not None:
                self.wanted = (self.wanted[0], version)
            for service in services:
                if (old := service.sampler) is not None:
                    service.sampler = Sampler(old.id, old.model, version, old.places)
            return
        made = await asyncio.gather(*(service.make(model, version) for service in services))
        self.wanted = (model, version)
        for service in self._of.values():  # one that came meanwhile, or is on its way out, asks for its own
            service.sampler = None
        for service, sampler in zip(services, made, strict=True):
            service.sampler = sampler

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self._of.values()))


def _lifetime_s(jwt: str) -> float:
    """``exp - iat`` of a token; both are the service's, so our clock does not matter. A minute when it does not say."""
    try:
        part = jwt.split(".")[1]
        claims = msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return max(60.0, float(claims["exp"]) - float(claims["iat"]))
    except (*NOT_JSON, IndexError, KeyError, TypeError, ValueError):
        return 60.0
