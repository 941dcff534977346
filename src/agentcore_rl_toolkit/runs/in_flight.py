"""`in_flight.json` of a run: the rollouts that have no outcome yet, rewritten every two seconds while there are any.

The process that waits for them writes it, because it knows their stages and deadlines and has the gateway's key.
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


class _Writer:
    """Writes the file of one folder. Several collections may have rollouts of the same run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sources: dict[object, tuple[Seen, Seen | None, str | None]] = {}
        self.ended, self._writing = threading.Event(), threading.Lock()
        self._gateway: dict[str, Any] = {"sessions": [], "error": "it has not answered yet"}
        threading.Thread(target=self._run, name="agentcore-rl-in-flight", daemon=True).start()

    def _run(self) -> None:
        warnings = WarnsOnceAMinute(log)
        while not self.ended.wait(EVERY_S):
            try:
                self._write()
            except Exception as e:  # the next attempt may succeed
                warnings.warning("%s could not be brought up to date: %r", self.path, e)

    def _write(self) -> None:
        sources = list(self.sources.values())
        each = {rollouts for rollouts, _, _ in sources}  # equal ones see the same rollouts
        found = {flight["session_id"]: flight for rollouts in each for flight in rollouts()}
        sessions = next((s for _, s, _ in sources if s is not None), None)
        facts = {
            "at_s": time.time(),
            "pid": os.getpid(),
            "count": len(found),
            "rollouts": sorted(found.values(), key=lambda r: -r["stage_s"])[:MOST],
            "runtime_url": next((url for _, _, url in sources if url), None),
            "gateway": None if sessions is None else self._gateway,
        }
        with self._writing:
            if not sources or self.ended.is_set():
                return
            partial = self.path.with_name(f".{IN_FLIGHT}.{os.getpid()}")
            partial.write_text(json.dumps(facts, default=str))
            partial.replace(self.path)
        if sessions is not None:  # last, because a gateway may hang
            try:
                self._gateway = {"sessions": list(sessions()), "error": None}
            except Exception as e:
                self._gateway = {"sessions": [], "error": str(e)}

    def end(self) -> None:
        """Write nothing more, and remove the file. The thread, which may wait for a gateway, ends by itself."""
        with self._writing:
            self.ended.set()
            self.path.unlink(missing_ok=True)


_writers: dict[Path, _Writer] = {}
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
        writer = _writers.get(path) or _writers.setdefault(path, _Writer(path))
        writer.sources[me] = (rollouts, sessions, runtime_url)
    try:
        yield
    finally:
        with _lock:
            del writer.sources[me]
            if not writer.sources:
                del _writers[path]
                writer.end()


def read_in_flight(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None if all rollouts have ended."""
    return read_object(folder / IN_FLIGHT) or None
