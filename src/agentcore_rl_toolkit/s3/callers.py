"""Who may use an endpoint that stands alone and demands no signature: what runs on this machine as this user or root.

It knows no sessions: those of this user's runtimes may use all of it. What sessions may do at a runtime's own endpoint is the
runtime's to say (`runtime.sessions.s3_access`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._servers.bounded_http import BoundedProtocol
from .._servers.callers import PEER, Callers, Peer
from .access import Scope
from .wire.errors import S3Error


class Connection(BoundedProtocol):
    """Gives its requests the connection's `Peer`, so that the kernel is asked once for each connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.peer = Peer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PEER] = self.peer  # type: ignore[literal-required]  # an addition to the specification's keys


class UsersOnly:
    """Refuses other users of this machine, and other machines."""

    def __init__(self, callers: Callers[Any]) -> None:
        self._callers = callers

    def secrets_of(self, access_key: str) -> Mapping[str, str]:
        return {}

    async def scope(self, asgi_scope: Mapping[str, Any], access_key: str) -> Scope | None:
        caller = await self._callers.of_scope(asgi_scope)
        if caller.is_user or caller.confined:
            return None
        raise S3Error(
            "AccessDenied",
            f"Access Denied: this store is not open to {caller.reason}; start it with --credential-file and sign, or with "
            "--callers any",
        )
