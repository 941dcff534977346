"""`in_flight.json` of a run: the rollouts that have no outcome yet, rewritten every two seconds while there are any.

The process that waits for them writes it, because it knows their stages and deadlines and has the keys. It asks the gateway as
well; before it asks it says so in the file, so that a reader sees a gateway that does not answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

IN_FLIGHT = "in_flight.json"
EVERY_S = 2.0
MOST = 1000  # rollouts in the file, those that wait longest first

Rollouts = Callable[[], Sequence[dict[str, Any]]]
Sessions = Callable[[], Sequence[dict[str, Any]]]


@contextlib.contextmanager
def in_flight(
    folder: Path, rollouts: Rollouts, sessions: Sessions | None = None, *, runtime_url: str | None = None
) -> Iterator[None]:
    """Keep the file while the block runs. ``rollouts`` and ``sessions`` are called on a thread of its own.

    ``rollouts`` is `RolloutClient.flights`, ``sessions`` the gateway's sessions with running calls.
    """
    ending, writing = threading.Event(), threading.Lock()
    path = folder / IN_FLIGHT

    def write(**facts: Any) -> None:
        partial = path.with_name(f".{IN_FLIGHT}.{os.getpid()}.{threading.get_ident()}")
        with writing:
            if ending.is_set():
                return
            try:
                partial.write_text(json.dumps({"at_s": time.time(), "pid": os.getpid(), **facts}, default=str))
                partial.replace(path)
            except (OSError, ValueError) as e:
                log.debug("%s was not written: %s", path, e)

    def keep() -> None:
        gateway: dict[str, Any] | None = None
        while not ending.wait(EVERY_S):
            found = sorted(rollouts(), key=lambda r: -r["stage_s"])
            facts = {"count": len(found), "rollouts": found[:MOST], "runtime_url": runtime_url}
            if sessions is None:
                write(**facts, gateway=None)
                continue
            asked_s = time.time()
            write(**facts, gateway={**(gateway or {"sessions": []}), "asked_s": asked_s, "answered_s": None})
            try:
                gateway = {"sessions": list(sessions()), "asked_s": asked_s, "answered_s": time.time(), "error": None}
            except Exception as e:  # whatever a client of the gateway raises is what a reader wants to see
                gateway = {"sessions": [], "asked_s": asked_s, "answered_s": time.time(), "error": str(e)}
            write(**facts, gateway=gateway)

    threading.Thread(target=keep, name="agentcore-rl-in-flight", daemon=True).start()
    try:
        yield
    finally:
        # The thread may wait for a gateway that never answers: it ends by itself, and writes nothing any more.
        with writing:
            ending.set()
            with contextlib.suppress(OSError):
                path.unlink()


def read_in_flight(folder: Path) -> dict[str, Any] | None:
    """What the file says; None where no rollout is in flight."""
    try:
        value = json.loads((folder / IN_FLIGHT).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
