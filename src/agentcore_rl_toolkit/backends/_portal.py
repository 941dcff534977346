"""The background loop that all backends share.

Clients that live on this loop keep their connections between calls, which a fresh loop per call would close.
"""

from __future__ import annotations

from .._portal import Portal

CLEAN_UP_S = 60.0  # limit for stopping live sessions and deleting them at the gateway, after Ctrl-C
portal = Portal("agentcore-rl-backends")
