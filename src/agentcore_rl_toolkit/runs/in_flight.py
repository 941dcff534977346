"""`in_flight.json` of a run: the rollouts that have no outcome yet, rewritten every two seconds while there are any.

The process that waits for them writes it, because it knows their stages and deadlines and has the keys. It also asks the gateway.
It notes each question in the file before it asks, so that a reader sees a gateway that does not answer.
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

from ..logs import WarnsOnceAMinute
from .folder import read_object

log = logging.getLogger(__name__)

IN_FLIGHT = "in_flight.json"
EVERY_S = 2.0
MOST = 1000  # rollouts in the file, those that wait longest first

Seen = Callable[[], Sequence[dict[str, Any]]]  # the rollouts of a client, or the sessions of a gateway


class _Keeper:
    """Writes the file of one folder for all who wait for rollouts of it: a stream has many collections at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: dict[object, tuple[Seen, Seen | None, str | None]] = {}
        self._ending, self._writing = threading.Event(), threading.Lock()
        self._gateway: dict[str, Any] | None = None
        self._warnings = WarnsOnceAMinute(log)
        threading.Thread(target=self._keep, name="agentcore-rl-in-flight", daemon=True).start()

    def _keep(self) -> None:
        while not self._ending.wait(EVERY_S):
            try:
                self._look()
            except Exception as e:  # a reader would see rollouts that have long ended
                self._warnings.warning("%s could not be brought up to date: %r", self.path, e)

    def _look(self) -> None:
        waiting = list(self.waiting.values())
        if not waiting:  # the first of them is about to be entered, or the last has just gone
            return
        each = {rollouts for rollouts, _, _ in waiting}  # equal ones see the same rollouts
        found = {flight["session_id"]: flight for rollouts in each for flight in rollouts()}
        longest = sorted(found.values(), key=lambda r: -r["stage_s"])[:MOST]
        sessions = next((s for _, s, _ in waiting if s is not None), None)
        url = next((u for _, _, u in waiting if u), None)
        facts = {"count": len(found), "rollouts": longest, "runtime_url": url}
        answer = None
        if sessions is not None:
            answer = self._gateway = {**(self._gateway or {"sessions": []}), "asked_s": time.time(), "answered_s": None}
            self._write(**facts, gateway=answer)
            answer |= {"sessions": [], "error": None}
            try:
                answer["sessions"] = list(sessions())
            except Exception as e:  # whatever a client of the gateway raises is what a reader wants to see
                answer["error"] = str(e)
            answer["answered_s"] = time.time()
        self._write(**facts, gateway=answer)

    def _write(self, **facts: Any) -> None:
        partial = self.path.with_name(f".{IN_FLIGHT}.{os.getpid()}")
        with self._writing:
            if self._ending.is_set():
                return
            try:
                partial.write_text(json.dumps({"at_s": time.time(), "pid": os.getpid(), **facts}, default=str))
                partial.replace(self.path)
            except (OSError, ValueError) as e:
                log.debug("%s was not written: %s", self.path, e)

    def end(self) -> None:
        """Write nothing more, and remove the file. The thread, which may wait for a gateway, ends by itself."""
        with self._writing:
            self._ending.set()
            with contextlib.suppress(OSError):
                self.path.unlink()


_keepers: dict[Path, _Keeper] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def in_flight(
    folder: Path, rollouts: Seen, sessions: Seen | None = None, *, runtime_url: str | None = None
) -> Iterator[None]:
    """Keep the file while the block runs; blocks of the same folder may overlap.

    ``rollouts`` (`RolloutClient.flights`) and ``sessions`` (the gateway's with running calls) are called on a separate thread.
    """
    path, me = folder.resolve() / IN_FLIGHT, object()
    with _lock:
        keeper = _keepers.get(path) or _keepers.setdefault(path, _Keeper(path))
        keeper.waiting[me] = (rollouts, sessions, runtime_url)
    try:
        yield
    finally:
        with _lock:
            del keeper.waiting[me]
            if not keeper.waiting:
                del _keepers[path]
                keeper.end()


def read_in_flight(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None if all rollouts have ended."""
    return read_object(folder / IN_FLIGHT) or None
