"""What a node, a place where sessions run, is told to start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..agents.agent import Agent

# What sessions see of the runtime's own environment: nothing else is inherited.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class SessionOrder:
    """A session to start. ``session_id`` is unique per start on its node, not the caller's id."""

    agent: Agent
    session_id: str
    directory: Path
    log_path: Path
    socket_path: str
