"""The key that changes the weights of a policy server."""

from __future__ import annotations

from ..._servers.keys import key_for

ADMIN_KEY_ENV = "AGENTCORE_RL_POLICY_ADMIN_KEY"


def admin_key(url: str) -> str | None:
    """The key to send to a policy server as ``Authorization: Bearer``: of the environment, else what one on this machine left for
    its user. None: none is known.
    """
    return key_for("policy", url, ADMIN_KEY_ENV)
