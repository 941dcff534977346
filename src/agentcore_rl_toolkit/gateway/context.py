"""The parts of a gateway that its calls and its administration share, and the interface of an engine."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from typing import Any

from ..messages.wire import Delta
from ..messages.wire.passthrough import Fields
from .capture.record import Captured
from .config import GatewayConfig
from .http.request import CallRequest
from .router import Router, RunningCalls, Worker
from .sessions import Session, Sessions


class Engine:
    """Writes the request of one call and reads its reply: `RelayedChat`, `TokenSampling`, `ServiceSampling`.

    ``pings``: a stream gets comments before its first delta. ``versions`` are the weight versions of the first and the last token
    if the engine knows them without its reply. ``headers`` are those of the server's reply.
    """

    pings = False
    versions: tuple[int | None, int | None] | None = None
    headers: Mapping[str, str] = {}

    def understand(self) -> Fields:
        """Return the request as a chat completion. Raises: RequestError."""
        raise NotImplementedError

    def compose(self, fields: Fields) -> None:
        """Take the request with the session's settings in it. Raises: RequestError."""
        raise NotImplementedError

    async def prepare(self, call_id: str) -> None:
        """Make the prompt. `release` follows, also after an error. Raises: RequestError."""

    def request(self, worker: Worker) -> tuple[bytes, bytes] | None:
        """Begin an attempt. Return path and body for the engine, or None if `sample` samples the call."""
        raise NotImplementedError

    async def sample(self, worker: Worker) -> list[Delta]:
        """Sample the call without a request to an engine. Raises: RequestError, CaptureError."""
        raise NotImplementedError

    def read(self, body: bytes) -> None:
        """Read a reply that is not streamed. Raises: CaptureError."""
        raise NotImplementedError

    def feed(self, data: bytes) -> list[Delta]:
        """Read a piece of a stream. Raises: CaptureError, UpstreamError."""
        raise NotImplementedError

    def cancel(self, worker: Worker) -> None:
        """End the attempt at the server. Most servers end it when its connection is closed."""

    def captured(self) -> Captured:
        """Return the content of the complete reply. Raises: CaptureError."""
        raise NotImplementedError

    async def release(self, *, stored: bool) -> None:
        """Add the reply to the session's history if it was ``stored``, and end the use of the history."""


class Context:
    """``engine`` is the kind of the engines; ``allow_fields`` are fields of requests that pass besides the known ones.

    ``token_mode`` (`TokenMode`) is None where chats are passed on, ``samplers`` (`Samplers`) where no service samples.
    """

    new_engine: Callable[[Session, CallRequest], Engine]

    def __init__(self, config: GatewayConfig, sessions: Sessions) -> None:
        self.config = config
        self.limits = config.limits
        self.engine = config.kind
        self.allow_fields = config.allow_fields
        self.sessions = sessions
        self.store = sessions.store
        self.counters: Counter[str] = Counter()
        self.router = Router(config.upstreams, config.limits)
        self.running = RunningCalls(config.limits)
        self.token_mode: Any = None
        self.samplers: Any = None
        self.connections: Sized = ()
        self.lag_s = self.lag_max_s = 0.0  # delay of timers: of the last one, and the longest
        self.started_s = time.time()
        self.run_id = secrets.token_hex(5)  # a restarted gateway must not use ids of the last run
        self.numbers = itertools.count()
