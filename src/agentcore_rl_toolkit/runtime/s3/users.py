"""Who may use an S3 endpoint that demands no signature: what runs on this machine as this user or root.

It knows no sessions: those of this user may use all of it. Where that is too much, sessions belong at the endpoint of their
runtime (``agentcore-rl runtime serve --s3-dir``), which gives each its own record only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..http.protocol import PEER, Peer
from ..sessions.callers import Callers
from .access import Scope
from .wire.errors import S3Error


class UsersOnly:
    """Refuses other users of this machine, and other machines. The kernel is asked once per connection."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def secrets_of(self, access_key: str) -> Mapping[str, str]:
        return {}

    async def scope(self, asgi_scope: Mapping[str, Any], access_key: str) -> Scope | None:
        peer: Peer = asgi_scope.get(PEER) or Peer()
        if peer.caller is None:
            peer.caller = await self._callers.ask(asgi_scope["client"], asgi_scope["server"])
        if peer.caller.is_user or peer.caller.confined:
            return None
        raise S3Error(
            "AccessDenied",
            f"Access Denied: this store is not open to {peer.caller.reason}; start it with --credential-file and sign, or with "
            "--callers any",
        )
