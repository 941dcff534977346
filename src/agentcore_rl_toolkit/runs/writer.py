"""Writes rollouts as they end, and never delays or breaks its caller.

Theory of operation. Callers put rollouts into a bounded queue and continue. One thread writes the whole queue in one transaction,
so that a group costs one commit. When the queue or the disk is full, new rollouts are dropped and counted. The counts are logged,
and kept in the run where that is possible. A process that is killed loses the last uncommitted second; the file stays whole
(SQLite's write-ahead log).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..logs import WarnsOnceAMinute
from .folder import ROLLOUTS, append_event
from .record import Rollout
from .spans import SpanSender
from .tables import Tables, TokenTexts

log = logging.getLogger(__name__)

COMMIT_S = 1.0
WAITING = 4096  # rollouts that wait to be written at most, and so the memory that they hold
CLOSE_S = 30.0
# Other processes may count in the same run.
_COUNT = "INSERT INTO run VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"

Make = Callable[[], Rollout]
Work = Callable[[Tables], None]


class RunWriter(contextlib.AbstractContextManager["RunWriter"]):
    """Appends to one run. Any thread may call it; nothing it does raises or waits, but `flush` and `close`.

    ``spans`` gets each rollout too, and is closed with the run.
    Raises: ConfigError when the folder holds a run of a newer version; OSError when it cannot be made.
    """

    def __init__(self, folder: Path, *, texts: TokenTexts | None = None, spans: SpanSender | None = None) -> None:
        self.folder, self._spans = folder, spans
        folder.mkdir(parents=True, exist_ok=True)
        self._dropped = self._failed = 0  # rollouts that came too fast, and that could not be written
        self._counted = 0  # those that the file counts
        self._done = 0  # works that were carried out
        self._work: queue.Queue[tuple[Work, int] | threading.Event | None] = queue.Queue(WAITING)
        self._metrics_lock = threading.Lock()
        self._closed = False
        self._warnings = WarnsOnceAMinute(log)
        self._tables: Tables | None = None
        try:
            self._tables = Tables(folder / ROLLOUTS, texts)
        except sqlite3.Error as e:
            log.warning("rollouts are not kept: %s cannot be written: %s", folder / ROLLOUTS, e)
        self._thread = threading.Thread(target=self._run, name="agentcore-rl-run-writer", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """The number of rollouts that were not kept."""
        return self._dropped + self._failed

    # -- what callers do

    def rollout(self, rollout: Rollout | Make) -> None:
        """Add a rollout, or one of the same session again in its place. A function is called on the writer's thread."""
        self._put(lambda tables: self._add(tables, rollout), rollouts=1)

    def annotate(
        self,
        session_id: str,
        *,
        sequences: Mapping[int, Mapping[str, Any]] | None = None,
        **columns: float | str | None,
    ) -> None:
        """Add what the trainer found out later: columns of the table, and by index the fields of a `TokenSequence`.

        Without ``gradient_tokens`` all trained tokens of the rollout get a gradient, or none if the advantage is 0.
        """
        known = {name: value for name, value in columns.items() if value is not None}
        self._put(lambda tables: tables.annotate(session_id, known, sequences or {}))

    def forget(
        self,
        *,
        from_step: int | None = None,
        phases: Sequence[str] = (),
        causes: Sequence[str] = (),
        evaluations_from: int | None = None,
    ) -> None:
        """Remove the rows that a resumed run is going to repeat.

        These are steps from ``from_step`` on, all of these phases and causes, and evaluations at ``evaluations_from`` or later.
        An earlier evaluation "after" the training, which now continues, becomes the evaluation of its step.
        """
        self._put(lambda tables: tables.move("phase = 'after' AND step < ?", (evaluations_from,), "eval"))
        # A comparison with NULL holds for no row.
        which = "(phase = 'train' AND step >= ?) OR (phase = 'eval' AND step >= ?)"
        which += "".join(f" OR {n} IN ({','.join('?' * len(v))})" for n, v in (("phase", phases), ("cause", causes)))
        self._put(lambda tables: tables.remove(which, (from_step, evaluations_from, *phases, *causes)))

    def event(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`, at once."""
        try:
            with self._metrics_lock:
                append_event(self.folder, event, facts)
        except (OSError, TypeError, ValueError, RecursionError) as e:
            self._warnings.warning("a line of metrics was not kept: %s", e)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything so far is on disk, or counted as lost. Returns whether it was in time."""
        done = threading.Event()
        try:
            self._work.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queue, and log how many rollouts were lost. A second call does nothing.

        A slow disk gets the time that it needs. The writer stops when nothing was written for ``timeout_s``.
        """
        if self._closed:
            return
        self._closed, before = True, -1
        with contextlib.suppress(queue.Full):  # then the thread ends when the queue is empty
            self._work.put_nowait(None)
        while self._thread.is_alive() and self._done != before:
            before = self._done
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s takes no writes: at least %d are not kept", self.folder, self._work.qsize())
        if self.lost:
            text = "%s: %d rollouts were not kept because they came faster than they could be written, %d because of errors"
            log.warning(text, self.folder / ROLLOUTS, self._dropped, self._failed)

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the thread

    def _put(self, work: Work, rollouts: int = 0) -> None:
        if self._closed or self._tables is None:
            self._dropped += rollouts
            return
        try:
            self._work.put_nowait((work, rollouts))
        except queue.Full:
            self._dropped += rollouts
            self._warnings.warning("some rollouts are not kept: they come faster than %s takes them", self.folder)

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, began_s = [self._work.get()], time.monotonic()
            while isinstance(batch[-1], tuple) and time.monotonic() - began_s <= COMMIT_S:
                try:
                    batch.append(self._work.get_nowait())
                except queue.Empty:
                    break
            self._write([work for work in batch if isinstance(work, tuple)])
            if isinstance(batch[-1], threading.Event):  # all before it is committed
                batch[-1].set()
            ended = batch[-1] is None or (self._closed and self._work.empty())
        if self._spans is not None:
            self._spans.close()
        self._write([])  # the summaries of the last steps
        if self._tables is not None:
            self._tables.close()

    def _write(self, batch: Sequence[tuple[Work, int]]) -> None:
        if self._tables is None:
            return
        failed = self._failed
        try:
            with self._tables.transaction():
                for work, rollouts in batch:
                    self._one(self._tables, work, rollouts)
                lost = self.lost
                if lost > self._counted:
                    self._tables.execute(_COUNT, ("not_kept", lost - self._counted))
            self._counted = lost
        except Exception as e:  # the next batch may succeed
            self._failed = failed + sum(rollouts for _, rollouts in batch)
            self._warnings.warning("rollouts of %s were not kept: %s", self.folder, e)

    def _one(self, tables: Tables, work: Work, rollouts: int) -> None:
        """Do one piece of work. If it fails, the others are still written."""
        self._done += 1
        try:
            work(tables)
        except sqlite3.OperationalError:  # the file or the disk, not this rollout
            raise
        except Exception as e:
            self._failed += rollouts
            self._warnings.warning("a rollout or its numbers were not kept: %s: %s", type(e).__name__, e)

    def _add(self, tables: Tables, given: Rollout | Make) -> None:
        rollout = given if isinstance(given, Rollout) else given()
        tables.insert(rollout)
        try:
            if self._spans is not None:
                self._spans.send(vars(rollout))
        except Exception as e:  # whatever an exporter does: the rollout itself is kept
            self._warnings.warning("spans of a rollout were not sent: %s: %s", type(e).__name__, e)
