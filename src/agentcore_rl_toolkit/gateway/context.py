"""The parts of a gateway that its calls and its administration share, and the interface of what samples a call."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sized
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ..messages.wire import Delta
from ..messages.wire.passthrough import Fields
from .capture.record import Captured
from .config import GatewayConfig
from .router import Router, RunningCalls, Worker
from .sessions import Session, Sessions
from .wire.request import CallRequest


class Engine(Protocol):
    """Samples one call: `RelayedChat`, `TokenSampling`, `ServiceSampling`.

    ``pings``: a stream gets comments before its first delta. ``versions`` are those of the first and the last token, if the
    engine knows them without its reply.
    """

    pings: bool
    versions: tuple[int | None, int | None] | None

    def understand(self) -> Fields:
        """Return the request as a chat completion. Raises: RequestError."""

    def compose(self, fields: Fields) -> None:
        """Take the request with the session's settings in it. Raises: RequestError."""

    def prompt(self, call_id: str) -> AbstractAsyncContextManager[None]:
        """Make the prompt. Leaving the block adds the answers to the session's history."""

    def sample(self, worker: Worker) -> AsyncGenerator[list[Delta], None]:
        """Sample at a server. An earlier attempt leaves nothing.

        Raises: ServerLostError, StatusError, RequestError, CaptureError, UpstreamError.
        """

    def captured(self) -> Captured:
        """Return the content of the complete reply. Raises: CaptureError."""


class Context:
    """``engine`` is the kind of the inference servers; ``allow_fields`` are fields of requests that pass besides the known ones.

    ``token_mode`` (`TokenMode`) is None where chats are passed on, ``samplers`` (`Samplers`) where no service samples.
    """

    new_engine: Callable[[Session, CallRequest], Engine]

    def __init__(self, config: GatewayConfig, sessions: Sessions) -> None:
        self.config = config
        self.limits = config.limits
        self.engine = config.kind
        self.allow_fields = config.allow_fields
        self.train_constrained = config.train_constrained
        self.forced_tools = config.forced_tools
        self.sessions = sessions
        self.store = sessions.store
        self.counters: Counter[str] = Counter()
        self.router = Router(config.upstreams, config.limits)
        self.running = RunningCalls(config.limits)
        self.token_mode: Any = None
        self.samplers: Any = None
        self.connections: Sized = ()
        self.lag_s = self.lag_max_s = 0.0  # how late timers run: the last one, and at worst
        self.started_s = time.time()
        self.run_id = secrets.token_hex(5)  # ids of one run of the gateway must not meet those of the last one
        self.numbers = itertools.count()
