"""Where session processes run: a `Node` starts them and says when they end; the runtime decides when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..agents.agent import Agent

# What sessions see of the runtime's own environment: nothing else is inherited.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class SessionOrder:
    """A session to start. ``session_id`` is unique per start on its node, not the caller's id. ``env``: its own variables."""

    agent: Agent
    session_id: str
    directory: Path
    log_path: Path
    socket_path: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


class Node(Protocol):
    """Starts sessions. The returned process has ``started`` and ``ended`` futures, ``pid``, ``command`` and ``stop(grace_s)``.

    One in a container has ``dial`` and ``cause`` as well.
    """

    async def start_session(self, order: SessionOrder) -> Any: ...
