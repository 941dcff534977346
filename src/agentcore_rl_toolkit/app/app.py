"""`AgentCoreRLApp`: the AgentCore app of a rollout agent."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from bedrock_agentcore.runtime import BedrockAgentCoreApp

from ..errors import ConfigError
from ..logs import configure_logging
from .engine import Engine
from .settings import AgentSettings

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class AgentCoreRLApp(BedrockAgentCoreApp):  # type: ignore[misc]  # the base class is untyped
    """A `BedrockAgentCoreApp` whose entrypoint runs a rollout in the background and stores its result.

    Takes the base class's arguments. Constructing it opens nothing: no socket, no thread, no client, so it may be snapshotted or
    forked afterwards. Settings come from the environment at the first request, or from `settings`.

    Example::

        app = AgentCoreRLApp()

        @app.rollout_entrypoint
        def run(payload: dict) -> dict:
            answer = solve(payload["prompt"], base_url=payload["_rollout"]["base_url"])
            return {"rewards": score(answer, payload["answer"])}

        app.run()
    """

    def __init__(
        self,
        debug: bool = False,
        lifespan: Callable[[Any], Any] | None = None,
        middleware: Sequence[Any] | None = None,
        *,
        settings: AgentSettings | None = None,
        **base: Any,
    ) -> None:
        configure_logging()
        super().__init__(debug=debug, lifespan=self._with_shutdown(lifespan), middleware=middleware, **base)
        self._engine = Engine(
            settings=lambda: settings or AgentSettings.from_env(),
            on_start=self.add_async_task,
            on_end=self.complete_async_task,
        )

    def rollout_entrypoint(self, func: F) -> Callable[..., Any]:
        """Register the rollout function: sync or async, ``(payload)`` or ``(payload, context)``.

        With ``exp_id``, ``input_id`` and ``s3_bucket`` in ``payload["_rollout"]`` its dict is stored under
        ``{exp_id}/{input_id}/{session_id}.json``; without them it runs and stores nothing. Either way the call is answered at
        once and `/ping` says ``HealthyBusy`` until the record is stored.

        Raises: ConfigError for generator functions, which have no single result.
        """
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise ConfigError(f"{func.__name__} is a generator; a rollout function returns one dict")
        takes_context = _takes_context(func)
        name = getattr(func, "__name__", None) or type(func).__name__

        @functools.wraps(func)
        async def rollout(payload: Any, context: Any) -> Any:
            return await self._engine.accept(func, name, takes_context, payload, context)

        # the SDK looks at the signature, and must see (payload, context) here
        del rollout.__wrapped__
        return self.entrypoint(rollout)  # type: ignore[no-any-return]  # the base class is untyped

    def _with_shutdown(self, lifespan: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        @contextlib.asynccontextmanager
        async def with_shutdown(app: Any) -> AsyncIterator[Any]:
            restore = self._on_sigterm()
            try:
                if lifespan is None:
                    yield
                else:
                    async with lifespan(app) as state:
                        yield state
            finally:
                self._engine.interrupt("the server shut down before the agent had finished")
                await self._engine.drain(self._engine.settings.grace_s)
                restore()

        return with_shutdown

    def _on_sigterm(self) -> Callable[[], None]:
        """Write `interrupted` records as soon as SIGTERM arrives, not only when the server has closed its connections."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            self._engine.interrupt("the session received SIGTERM before the agent had finished")
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, handle)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is handle:
                signal.signal(signal.SIGTERM, before)

        return restore


def _takes_context(func: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].name == "context" or positional[1].default is positional[1].empty)
