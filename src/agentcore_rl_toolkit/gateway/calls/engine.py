"""The engine side of a call: the interface between a call and the engine that samples its reply."""

from __future__ import annotations

from typing import Protocol

from ...messages.dialects import Delta
from ...messages.dialects.passthrough import Fields
from ..capture.record import Captured
from ..upstreams.router import Worker
from .running import RunningCall, RunningCalls


class WeightSpan:
    """The published weights that a reply's tokens may be of (`capture.versions`): those of when the call was sent
    (``begun``), and those of when its last token came (``last``; None: not known).
    """

    __slots__ = ("_changes", "_late", "_running", "_until", "begun", "last")

    def __init__(self, running: RunningCalls) -> None:
        self._running = running
        self.begun: int | None = None
        self.last: int | None = None
        self._changes = 0  # of the running calls' weights, when the call was sent
        self._until = 0  # bytes of the reply that had arrived when others were published
        self._late = True  # whether what was read last came after that

    def fix(self, version: int | None) -> None:
        """These weights sample the reply, whatever is published meanwhile."""
        self.begun = self.last = version

    def sent(self) -> None:
        self.begun = self.last = self._running.weight_version
        self._until, self._changes = 0, self._running.changes

    @property
    def changed(self) -> bool:
        """Whether weights may have been changed since the call was sent."""
        return self._changes != self._running.changes

    def arrived(self, before: int) -> None:
        """More of the reply is read; so many bytes were read before it."""
        self._late = before >= self._until

    def sampled(self) -> None:
        """Tokens have come, sampled with the weights that are published now, unless they waited here when these were."""
        if self._late and self.changed:
            self.last = self._running.sampling

    def change(self, arrived: int) -> None:
        """Other weights are about to be published; so many bytes of the reply are of those before."""
        self._until = arrived


class Incoming:
    """A reply as it comes from a server. ``kind`` is the engine of the server that writes it, ``upstream_id`` its name."""

    __slots__ = ("first_token_s", "headers", "kind", "parts", "received", "span", "status", "upstream_id")

    def __init__(self, running: RunningCalls) -> None:
        self.kind = "openai"
        self.upstream_id: str | None = None
        self.span = WeightSpan(running)
        self.clear()

    def clear(self) -> None:
        """Another reply comes."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.received = 0  # bytes
        self.first_token_s: float | None = None

    def body(self) -> bytes:
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class EngineSide(Protocol):
    """How a request is written for inference servers, and how a reply is read: `RelayedChat`, `TokenSampling`."""

    incoming: Incoming

    def understand(self, body: bytes) -> Fields:
        """Read what the agent asks for; the request as it is recorded. Raises: RequestError."""

    def compose(self, fields: Fields) -> None:
        """Write what all servers get of the request, once the session's settings are in it. Raises: RequestError."""

    def prepare(self, owner: RunningCall, call_id: str) -> None:
        """Do what comes before a server is chosen; then ``owner.go()``."""

    def request_for(self, worker: Worker) -> tuple[bytes, tuple[bytes, ...]]:
        """Path and body, in pieces, for this server. Raises: RequestError."""

    def stop(self, worker: Worker) -> None:
        """The call at this server was called off: end it there."""

    def forget(self) -> None:
        """Drop the part of a reply that was read: another one comes."""

    def feed(self, data: bytes) -> list[Delta]:
        """Read whole events of a stream. Raises: CaptureError, UpstreamError."""

    def capture(self) -> Captured:
        """The content of the whole reply. Raises: CaptureError."""

    def release(self) -> None:
        """The call is over."""
