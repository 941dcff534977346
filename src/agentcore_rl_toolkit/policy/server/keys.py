"""The key that changes the weights of a policy server."""

from __future__ import annotations

from ..._servers.keys import key_for

ADMIN_KEY_ENV = "AGENTCORE_RL_POLICY_ADMIN_KEY"


def admin_key(url: str) -> str | None:
    """Return the key to send to a policy server as ``Authorization: Bearer``, or None if it is unknown.

    The key comes from the environment, otherwise from the file that a server on this machine left for its user.
    """
    return key_for("policy", url, ADMIN_KEY_ENV)
