"""The parts of a gateway that its calls and its administration share, and the interface of an engine."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..messages.wire import DIALECTS, Delta, StreamEncoder
from .capture.record import CallRecord, Captured
from .capture.replay import reply_of
from .config import GatewayConfig
from .http.request import CallRequest
from .router import Router, RunningCalls, Worker
from .sessions import Session, Sessions


class Attempt(Protocol):
    """A request to a server, and the reader of its reply. Without a ``path``, `Engine.sample` samples the call.

    ``reported`` is the last weight version that the server named, if the router must know it.
    """

    path: bytes
    body: bytes
    reported: int | str | None

    def read(self, body: bytes) -> None:
        """Read a reply that is not streamed. Raises: CaptureError."""

    def feed(self, data: bytes) -> list[Delta]:
        """Read a piece of a stream. Raises: CaptureError, UpstreamError."""

    def captured(self) -> Captured:
        """Return the content of the complete reply."""


@dataclass(eq=False, repr=False)
class Engine:
    """Samples one call, and writes its reply in the agent's dialect: `RelayedChat`, `TokenSampling`, `ServiceSampling`.

    ``passes``: the agent gets the server's bytes. ``pings``: a stream gets comments before its first delta. ``versions`` are the
    weight versions of the first and the last token if the engine knows them without its reply.
    """

    context: Context
    session: Session
    request: CallRequest
    passes: bool = field(default=False, init=False)
    pings: bool = field(default=False, init=False)
    versions: tuple[int | None, int | None] | None = field(default=None, init=False)

    def compose(self) -> None:
        """Put the session's settings into the request, and check it. Raises: RequestError."""
        raise NotImplementedError

    async def prepare(self, call_id: str) -> None:
        """Make the prompt. `release` follows, also after an error. Raises: RequestError."""

    def attempt(self) -> Attempt:
        """Return the request for a server, and the reader of its reply."""
        raise NotImplementedError

    async def sample(self, worker: Worker) -> list[Delta]:
        """Sample the call without a request to an engine. Raises: RequestError, CaptureError."""
        raise NotImplementedError

    def cancel(self, worker: Worker) -> None:
        """End the attempt at the server. Most servers end it when its connection is closed."""

    async def release(self, *, stored: bool) -> None:
        """Add the reply to the session's history if it was ``stored``, and end the use of the history."""

    def encoder(self) -> StreamEncoder:
        """Return the encoder of a stream for the agent."""
        request = self.request
        return DIALECTS[request.dialect].encoder(request.asked, reply_id=request.reply_id, model=request.asked.model)

    def whole(self, record: CallRecord) -> bytes:
        """Return a complete reply for the agent. Raises: UpstreamError."""
        raise NotImplementedError

    def replayed(self, record: CallRecord) -> bytes:
        """Return the recorded reply of a call that the request repeats. Raises: UpstreamError."""
        return DIALECTS[self.request.dialect].encode_reply(reply_of(record), self.request.asked)


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
        self.run_id = secrets.token_hex(5)  # a restarted gateway must not use ids of the last run
        self.numbers = itertools.count()
