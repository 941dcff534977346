"""The background loop that all backends share.

Clients that live on this loop keep their connections between calls, which a fresh loop per call would close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from .._portal import Portal

T = TypeVar("T")

CLEAN_UP_S = 60.0  # limit for stopping live sessions and deleting them at the gateway

_portal = Portal("agentcore-rl-backends")


def start() -> asyncio.AbstractEventLoop:
    """Return the shared loop. Start it if it does not run yet."""
    return _portal.loop


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; works inside a running loop and in notebooks.

    Ctrl-C cancels the coroutine and waits for its clean-up, at most `CLEAN_UP_S`.
    Raises: ConfigError when called on the loop's own thread.
    """
    return _portal.call(work, clean_up_s=CLEAN_UP_S)
