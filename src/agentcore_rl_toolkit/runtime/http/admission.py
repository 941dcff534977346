"""What callers may do who are not this machine's user."""

from __future__ import annotations

from typing import Any

from ..._servers.callers import Caller
from ..wire import WireError

HOW = "give the runtime credentials (AGENTCORE_RL_CREDENTIALS or --credential-file) and sign the request"


def refuse_management(caller: Caller[Any]) -> None:
    """Raises: WireError 403 with the reason, unless it is this machine's user."""
    if not caller.is_user:
        raise WireError("AccessDeniedException", f"Managing this runtime is not open to {caller.reason}; {HOW}.")
