"""The gateway: one event loop, one listening socket, sessions, router and store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._servers.process import listen, url_of
from ..errors import ConfigError, GatewayError
from ..messages.errors import RequestError
from .admin import Admin
from .config import SAMPLING_SERVICES, GatewayConfig, UpstreamConfig
from .context import Context
from .dispatch import Dispatch
from .http.server import Handler, Server
from .relayed_chat import RelayedChat
from .sessions import Sessions
from .store.writer import Store

if TYPE_CHECKING:
    from .sampling_services.samplers import SamplingService
    from .token_calls.mode import TokenMode

log = logging.getLogger(__name__)

TICK_S = 0.25


class Gateway:
    """A running gateway. Make it, then `await start()`; `url` is where it listens.

    ``handle`` answers its requests. Before `start`, another handler may take its place.

    ``connect`` replaces the client of a sampling service: for engine tinker it makes an object with the methods of
    `tinker.ServiceClient`, for engine sagemaker a `SamplingService`.
    Raises: ConfigError from `start` when the port is in use or another gateway holds the store.
    """

    def __init__(self, config: GatewayConfig, *, connect: Callable[[], Any] | None = None) -> None:
        self.config = config
        self.url = ""
        directory = None if config.store_dir is None else Path(config.store_dir)
        try:
            self.store = Store(directory, fsync=config.fsync)
            self.sessions = Sessions(self.store, model_id=config.model_id)
            self.recovered = self.sessions.restore()
        except OSError as e:
            raise ConfigError(f"the store {directory} cannot be used: {e.strerror or e}") from e
        except GatewayError as e:
            self.store.close()
            raise ConfigError(str(e)) from e
        try:
            context = self._context = Context(config, self.sessions)
            self._load_model(connect)
            self.admin = Admin(context)
            self.admin.restore()
        except BaseException:
            self.store.close()
            raise
        self.counters, self.router, self.running = context.counters, context.router, context.running
        self.token_mode, self.samplers = context.token_mode, context.samplers
        self.handle: Handler = Dispatch(context, self.admin).handle
        self._accepting: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[None] | None = None

    def _load_model(self, connect: Callable[[], Any] | None) -> None:
        """Choose the engine of calls, and load tokenizer and template if the gateway renders prompts.

        Raises: ConfigError, MissingExtraError.
        """
        config, context = self.config, self._context
        if config.model_dir is None:
            context.new_engine = partial(RelayedChat, context)
            return
        from .token_calls.mode import TokenMode
        from .token_calls.sampling import TokenSampling

        mode = context.token_mode = TokenMode(config.model_dir, config, self.store)
        if not any(u.engine in SAMPLING_SERVICES for u in config.upstreams):
            context.new_engine = partial(TokenSampling, context, mode=mode)
            return
        from .sampling_services.samplers import Samplers, ServiceSampling

        wanted = None if config.sampler is None else (config.sampler, None)
        context.samplers = Samplers(_service(config.upstreams[0], connect, mode), wanted)
        context.new_engine = partial(ServiceSampling, context, mode=mode, samplers=context.samplers)

    async def start(self) -> None:
        """Open the store and listen. Raises: ConfigError when the address is in use."""
        loop, context = asyncio.get_running_loop(), self._context
        self.store.start(loop)
        try:
            listening = listen(self.config.host, self.config.port)
        except ConfigError:
            self.store.close()
            raise
        self.url = url_of(listening)
        self.router.start()
        self.connections = context.connections = Server(self.handle, self.config.limits)
        self._listening = listening
        self._accepting = loop.create_task(self.connections.accept(listening))
        self._ticker = loop.create_task(self._tick())

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Stop listening, let running calls finish for `grace_s`, close the store. A second call does nothing."""
        if self._accepting is None:
            return
        accepting, self._accepting = self._accepting, None
        accepting.cancel()  # perhaps before it began
        await asyncio.wait([accepting])
        self._listening.close()
        self.connections.pre_shutdown()
        await self.running.until(lambda: not self.running.calls, grace_s)
        for call in list(self.running.calls):
            call.abort(RequestError("the gateway is stopping", kind="overloaded"))
        await self.running.until(lambda: not self.running.calls, grace_s)
        await self.connections.shutdown(grace_s)
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self.samplers is not None:
            await self.samplers.close()
        if self.token_mode is not None:
            self.token_mode.executor.shutdown(wait=False, cancel_futures=True)
            if self.token_mode.tasks:  # engines are asked to end the calls that were aborted
                await asyncio.wait(self.token_mode.tasks, timeout=grace_s)
            await self.token_mode.tasks.cancel()
        await self.router.close()
        await self.store.stop()

    async def _tick(self) -> None:
        """Remove drained servers, maintain the store, and measure how late the event loop is."""
        context, due = self._context, time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            context.lag_s = max(0.0, now - due)
            context.lag_max_s = max(context.lag_max_s, context.lag_s)
            due = now + TICK_S
            for work in (self.router.sweep, self.store.tend):
                try:
                    work()
                except Exception:  # the other tasks, and all later rounds, must still run
                    log.exception("a periodic task of the gateway failed; it is tried again")


def _service(upstream: UpstreamConfig, connect: Callable[[], Any] | None, mode: TokenMode) -> SamplingService:
    """Make the adapter of the sampling service. Raises: ConfigError, MissingExtraError."""
    if upstream.engine == "sagemaker":
        if connect is not None:
            return connect()  # type: ignore[no-any-return]  # typed by its maker
        from .sampling_services.sagemaker import SageMakerService

        return SageMakerService(upstream.url, mode.renderer.decode)
    from .sampling_services.tinker import TinkerService

    return TinkerService.at(upstream) if connect is None else TinkerService(connect)
