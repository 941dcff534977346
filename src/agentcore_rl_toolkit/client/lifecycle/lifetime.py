"""What outlives a client object: its opened stores, and engines with sessions still to be stopped."""

from __future__ import annotations

import atexit
import contextlib
from urllib.parse import urlsplit

from ..._portal import Portal
from ...errors import ConfigError
from ...store import ObjectStore, open_store
from .engine import Engine


class Stores:
    """The stores of a client by bucket, each opened once."""

    def __init__(self, bucket: str, store: ObjectStore) -> None:
        self._opened = {bucket: store}

    def __call__(self, bucket: str) -> ObjectStore:
        if bucket not in self._opened:
            self._opened[bucket] = open_store(bucket)
        return self._opened[bucket]


def is_loopback(url: str | None) -> bool:
    host = (urlsplit(url).hostname or "") if url else ""
    return host in ("localhost", "::1") or host.startswith("127.")


# Engines that may still have sessions to stop. Strong on purpose: a dropped client must not take its stops with it.
open_engines: set[tuple[Portal, Engine]] = set()


def dropped(portal: Portal, engine: Engine) -> None:
    """The client was garbage-collected without `close`: its engine ends when nothing is left to do."""
    if not portal.started:
        open_engines.discard((portal, engine))
        return

    def ended(_: object) -> None:
        open_engines.discard((portal, engine))
        portal.close()

    with contextlib.suppress(ConfigError, RuntimeError):
        portal.submit(engine.linger_async()).add_done_callback(ended)


@atexit.register
def _flush_at_exit() -> None:
    """Send the stops that are still open. Rollouts in flight are left running: their results will be in the store."""
    for portal, engine in list(open_engines):
        if portal.started:
            portal.call(engine.close_async(cancel=False))
