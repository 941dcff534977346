"""The engine side of a call: what a call asks of whatever samples its reply, and what that may ask of the call."""

from __future__ import annotations

from typing import Protocol

from ..capture.reply import Captured
from ..dialects import Delta
from ..dialects.passthrough import Fields
from ..errors import RequestError
from ..http.body import Bytes
from ..upstreams.router import Worker
from .incoming import Incoming
from .states import State


class EngineSide(Protocol):
    """How a request is written for inference servers, and how a reply is read: `RelayedChat`, `TokenSampling`."""

    incoming: Incoming
    particular: tuple[str, ...]  # what the request asks for that not every server takes

    def fits(self, worker: Worker) -> bool:
        """Whether this server takes what is in ``particular``."""
        ...

    def understand(self, body: bytes) -> Fields:
        """Read what the agent asks for; the request as it is recorded. Raises: RequestError."""
        ...

    def compose(self, fields: Fields, path: bytes) -> None:
        """Write what all servers get of the request, once the session's settings are in it. Raises: RequestError."""
        ...

    def prepare(self, owner: Owner, call_id: str) -> None:
        """Do what comes before a server is chosen; then ``owner.go()``."""
        ...

    def request_for(self, worker: Worker) -> tuple[bytes, tuple[Bytes, ...]]:
        """Path and body, in pieces, for this server. Raises: RequestError."""
        ...

    def stop(self, worker: Worker) -> None:
        """The call at this server was called off: end it there."""
        ...

    def goes_without(self, status: int, body: bytes) -> bool:
        """Whether the server refused what the call can do without: it is asked again then."""
        ...

    def forget(self) -> None:
        """What was read of a reply counts no more: another one comes."""
        ...

    def feed(self, data: bytes) -> list[Delta]:
        """Read whole events of a stream. Raises: CaptureError, UpstreamError."""
        ...

    def read_early(self) -> None:
        """The reply is whole, and will be captured in a while: do now what is best done while its bytes are near."""
        ...

    def capture(self) -> Captured:
        """What the whole reply says. Raises: CaptureError."""
        ...

    def release(self) -> None:
        """The call is over."""
        ...

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers for the agent: what was asked for and is not held."""
        ...


class Transport(Protocol):
    """How the request gets to a server and the reply's bytes back: `Exchange`, and Tinker's."""

    def route(self) -> None:
        """Choose a server and send the request to it."""
        ...

    def stop(self) -> None:
        """The call ends: nobody waits for the reply any more."""
        ...

    def close(self) -> None:
        """The call has ended."""
        ...

    def weights_change(self, *, slow: bool) -> None:
        """Other weights are about to be published. ``slow``: the agent's connection holds the reply up."""
        ...

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Owner(Protocol):
    """The call, as its engine side sees it."""

    deadline: float | None

    @property
    def state(self) -> State: ...
    @property
    def ended(self) -> bool: ...
    def become(self, state: State) -> None: ...
    def abort(self, error: RequestError) -> None: ...
    def weights_change(self) -> None: ...
    def go(self) -> None:
        """Off to a server, or wait with everybody else while the gateway is paused."""
        ...

    def route(self) -> None: ...
    def take(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def forget(self) -> None: ...
    def pass_error(self, status: int, body: bytes) -> None: ...
    def fail(self, error: RequestError) -> None: ...
    def broke(self, error: Exception) -> None: ...
    def may_read(self) -> bool: ...
    def comment(self, text: bytes) -> bool:
        """Write a comment line to an agent that waits for a stream. False: none waits any more."""
        ...
