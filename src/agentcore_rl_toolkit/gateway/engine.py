"""The interface between a call and what samples it: `RelayedChat`, `TokenSampling`, `ServiceSampling`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..messages.wire import Delta
from ..messages.wire.passthrough import Fields
from .capture.record import Captured
from .routing.router import Worker


class Engine(Protocol):
    """Samples one call: writes its request for servers, and reads their replies as deltas.

    ``pings``: a stream gets comments before its first delta.
    """

    pings: bool

    def understand(self) -> Fields:
        """The request as a server gets it. Raises: RequestError."""

    def compose(self, fields: Fields) -> None:
        """Write the request, once the session's settings are in it. Raises: RequestError."""

    def prompt(self, call_id: str) -> AbstractAsyncContextManager[None]:
        """Make the prompt. Leaving the block adds the answers to the session's history."""

    def sample(self, worker: Worker) -> AsyncGenerator[list[Delta], None]:
        """Sample at a server. Raises: ServerLostError, StatusError, RequestError, CaptureError, UpstreamError."""

    def versions(self, begun: int | None, ended: int | None) -> tuple[int | None, int | None]:
        """The versions of the first and the last token, as far as is known before the engine names some.

        The published versions are ``begun`` and ``ended`` when the call is sent and when its reply is complete.
        """

    def captured(self) -> Captured:
        """The content of the complete reply. Raises: CaptureError."""

    def reset(self) -> None:
        """Drop the part of a reply that was read: another one comes."""
