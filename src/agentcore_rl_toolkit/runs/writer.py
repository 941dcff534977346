"""Writes rollouts as they end, and never delays or breaks its caller.

Theory of operation. Callers put rollouts into a bounded queue and go on; one thread writes the whole queue in one transaction, so
that a group costs one commit. When the queue or the disk is full, new rollouts are dropped and counted. The counts are logged,
and kept in the run where that is possible. A process that is killed loses the last uncommitted second; the file stays whole
(SQLite's write-ahead log).
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import AgentCoreRLError
from ..logs import WarnsOnceAMinute
from .folder import METRICS, ROLLOUTS
from .record import (
    DETAIL,
    DIALOGUE,
    TOKENS,
    Rollout,
    TokenSequence,
    numbers_of,
    pack,
    searched_text,
    tool_errors,
    tools_of,
    unpack,
)
from .schema import open_to_write, searchable
from .spans import SpanSender, seconds_of_tools

log = logging.getLogger(__name__)

COMMIT_S = 1.0
WAITING = 4096  # rollouts that wait to be written at most, and so the memory that they hold
CLOSE_S = 30.0
_PARTS = (TOKENS, DIALOGUE, DETAIL)  # in this order they are given up


Make = Callable[[], Rollout | Iterable[Rollout]]
Work = Callable[[sqlite3.Connection], None]


class TokenTexts:
    """Texts by a tokenizer's folder (or its `tokenizer.json`), loaded at the first use.

    Where there is none, or the library `tokenizers` is not installed, tokens have no text.
    """

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder)
        self._tokenizer: Any = None
        self._tried = False

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Token id -> its text. Bytes that are no text of their own are U+FFFD, as every decoder shows them."""
        if not self._tried:
            self._tried = True
            self._tokenizer = self._load()
        if self._tokenizer is None:
            return {}
        found: dict[int, str] = {}
        for token in ids:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            piece = self._tokenizer.id_to_token(token)
            # Decoders of the SentencePiece kind drop the blank that begins a word.
            if piece is not None and piece.startswith("\u2581") and not text.startswith(" "):
                text = " " + text
            found[token] = text if text or piece is None else piece
        return found

    def probe(self, count: int) -> dict[int, str]:
        """`of` the special tokens and of about ``count`` others from all over the vocabulary."""
        self.of(())
        if self._tokenizer is None:
            return {}
        size = self._tokenizer.get_vocab_size()
        return self.of(sorted({*self._tokenizer.get_added_tokens_decoder(), *range(0, size, max(1, size // count))}))

    def _load(self) -> Any:
        path = self._path / "tokenizer.json" if self._path.is_dir() else self._path
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            return None
        if not path.is_file():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain exceptions; a run without texts is still a run
            log.warning("tokens of this run have no text: %s cannot be read: %s", path, e)
            return None


class RunWriter:
    """Appends to one run. Any thread may call it; nothing it does raises or waits, but `flush` and `close`.

    Beyond ``max_gb`` the oldest rollouts lose their tokens, then the rest but their row; each such row says so. ``spans`` gets
    each rollout too, and is closed with the run.
    Raises: ConfigError when the folder holds a run of a newer version; OSError when it cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_gb: float = 20.0,
        texts: TokenTexts | None = None,
        spans: SpanSender | None = None,
    ) -> None:
        self.folder, self.texts = folder, texts
        self._limit = max_gb * 2**30
        self._spans = spans
        folder.mkdir(parents=True, exist_ok=True)
        self.written = self.dropped = self.failed = 0
        self._known: set[int] = set()  # token ids whose text is written
        self._bytes = 0
        self._work: queue.Queue[Work | threading.Event | None] = queue.Queue(WAITING)
        self._metrics_lock = threading.Lock()
        self._closed = False
        self._warnings = WarnsOnceAMinute(log)
        try:
            self._database: sqlite3.Connection | None = open_to_write(folder / ROLLOUTS)
            self._bytes = int(self._database.execute("SELECT COALESCE(SUM(bytes), 0) FROM rollouts").fetchone()[0])
            self._searchable = searchable(self._database)
            self._known = {row[0] for row in self._database.execute("SELECT id FROM token_texts")}
        except sqlite3.Error as e:
            log.warning("no rollouts are kept: %s cannot be written: %s", folder / ROLLOUTS, e)
            self._database = None
        self._thread = threading.Thread(target=self._run, name="agentcore-rl-run-writer", daemon=True)
        self._thread.start()

    # -- what callers do

    def rollout(self, rollout: Rollout | Make) -> None:
        """Add a rollout, or one of the same session again in its place. A function is called on the writer's thread."""
        self._put(lambda database: self._add(database, rollout))

    def annotate(
        self,
        session_id: str,
        *,
        step: int | None = None,
        advantage: float | None = None,
        gradient_tokens: int | None = None,
        mask_reason: str | None = None,
        sequences: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add what the trainer found out later. ``sequences``: by index, `TokenSequence`'s fields of trainers.

        Without ``gradient_tokens`` all trained tokens of the rollout get a gradient, or none if the advantage is 0.
        """
        columns = {"step": step, "advantage": advantage, "gradient_tokens": gradient_tokens, "mask_reason": mask_reason}
        known = {name: value for name, value in columns.items() if value is not None}
        self._put(lambda database: self._annotate(database, session_id, known, sequences or {}))

    def forget(self, *, from_step: int, phases: Sequence[str] = (), evaluations_from: int | None = None) -> None:
        """Remove steps that a resumed run is going to repeat, all of these phases, and of phase "eval" what is at
        ``evaluations_from`` or later.
        """

        def forget(database: sqlite3.Connection) -> None:
            places = ",".join("?" * len(phases))
            # A comparison with NULL holds for no row.
            steps = "(phase = 'train' AND step >= ?) OR (phase = 'eval' AND step >= ?)"
            which = f"SELECT id FROM rollouts WHERE {steps} OR phase IN ({places})"
            self._forget(database, which, (from_step, evaluations_from, *phases))

        self._put(forget)

    def event(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`, at once."""
        try:
            line = json.dumps({"event": event, **facts}, default=str)
            with self._metrics_lock, (self.folder / METRICS).open("a") as out:
                out.write(line + "\n")
        except (OSError, ValueError) as e:
            self._warnings.warning("a line of metrics was not kept: %s", e)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything so far is on disk. Returns whether it is."""
        done = threading.Event()
        deadline = time.monotonic() + timeout_s
        while not self._closed and self._thread.is_alive():
            try:
                self._work.put(done, timeout=max(0.0, deadline - time.monotonic()))
                break
            except queue.Full:
                if time.monotonic() >= deadline:
                    return False
        return done.wait(max(0.0, deadline - time.monotonic())) or not self._thread.is_alive()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits, say what was dropped. Twice does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self.dropped or self.failed:
            log.warning(
                "%s: %d rollouts were not kept because they came faster than they could be written, %d because of errors",
                self.folder / ROLLOUTS,
                self.dropped,
                self.failed,
            )

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the thread

    def _put(self, work: Work) -> None:
        if self._closed or self._database is None:
            self.failed += 1
            return
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self.dropped += 1
            self._warnings.warning(
                "rollouts come faster than they can be written to %s; some are not kept", self.folder
            )

    def _run(self) -> None:
        ended = False
        while not ended:
            work = self._work.get()
            batch, began_s = [], time.monotonic()
            while True:
                if work is None:
                    ended = True
                    break
                batch.append(work)
                if isinstance(work, threading.Event) or time.monotonic() - began_s > COMMIT_S:
                    break
                try:
                    work = self._work.get_nowait()
                except queue.Empty:
                    break
            self._write(batch)
        if self._database is not None:
            self._write([self._counts])
            if self._spans is not None:
                self._spans.close()
            with contextlib.suppress(sqlite3.Error):
                self._database.close()

    def _write(self, batch: Sequence[Work | threading.Event]) -> None:
        database = self._database
        if database is not None:
            try:
                database.execute("BEGIN IMMEDIATE")
                for work in batch:
                    if not isinstance(work, threading.Event):
                        self._one(database, work)
                self._shrink(database)
                if self.dropped or self.failed:
                    self._counts(database)
                database.execute("COMMIT")
            except (sqlite3.Error, OSError) as e:
                self.failed += len(batch)
                self._warnings.warning("rollouts of %s were not kept: %s", self.folder, e)
                with contextlib.suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
        for work in batch:
            if isinstance(work, threading.Event):  # all before it is committed
                work.set()

    def _one(self, database: sqlite3.Connection, work: Work) -> None:
        """One that cannot be written takes no other with it."""
        database.execute("SAVEPOINT one")
        try:
            work(database)
        except (AgentCoreRLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            database.execute("ROLLBACK TO one")
            self.failed += 1
            self._warnings.warning("a rollout was not kept: %s: %s", type(e).__name__, e)
        database.execute("RELEASE one")

    def _counts(self, database: sqlite3.Connection) -> None:
        for name, value in (("not_kept_full", self.dropped), ("not_kept_error", self.failed)):
            if value:
                database.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (name, value))

    # -- one piece of work

    def _add(self, database: sqlite3.Connection, given: Rollout | Make) -> None:
        made = given if isinstance(given, Rollout) else given()
        for rollout in [made] if isinstance(made, Rollout) else made:
            self._insert(database, rollout)
            self._send_spans(rollout)
            self.written += 1

    def _send_spans(self, rollout: Rollout) -> None:
        if self._spans is None:
            return
        try:
            self._spans.send(vars(rollout))
        except Exception as e:  # whatever an exporter does: the rollout itself is kept
            self._warnings.warning("spans of a rollout were not sent: %s: %s", type(e).__name__, e)

    def _insert(self, database: sqlite3.Connection, rollout: Rollout) -> None:
        before = database.execute("SELECT id FROM rollouts WHERE session_id = ?", (rollout.session_id,)).fetchone()
        if before is not None:  # it keeps its number, which addresses name
            self._forget(database, "SELECT id FROM rollouts WHERE id = ?", before)
        detail = rollout.detail()
        parts = {DETAIL: pack(detail)}
        if rollout.dialogue is not None:
            parts[DIALOGUE] = pack(list(rollout.dialogue))
        if rollout.sequences is not None:
            parts[TOKENS] = pack([sequence.encoded() for sequence in rollout.sequences])
        tools = tools_of(rollout.dialogue)
        columns = ({} if before is None else {"id": before[0]}) | rollout.columns()
        columns["tool_calls"] = sum(tools.values()) if rollout.dialogue is not None else None
        columns["bytes"] = sum(map(len, parts.values()))
        names = ", ".join(columns)
        places = ", ".join("?" * len(columns))
        cursor = database.execute(f"INSERT INTO rollouts ({names}) VALUES ({places})", tuple(columns.values()))
        row = cursor.lastrowid
        database.executemany(
            "INSERT INTO parts (rollout, name, data) VALUES (?, ?, ?)", [(row, *p) for p in parts.items()]
        )
        errors, seconds = tool_errors(rollout.dialogue), seconds_of_tools(vars(rollout))
        database.executemany(
            "INSERT INTO tools VALUES (?, ?, ?, ?, ?)",
            [(row, tool, calls, errors.get(tool, 0), seconds.get(tool)) for tool, calls in tools.items()],
        )
        database.executemany("INSERT INTO numbers VALUES (?, ?, ?)", [(row, *n) for n in rollout.numbers().items()])
        if self._searchable:
            document = database.execute("INSERT INTO searched (rollout) VALUES (?)", (row,)).lastrowid
            text = searched_text(rollout.dialogue, detail, columns["error"])
            database.execute("INSERT INTO search (rowid, text) VALUES (?, ?)", (document, text))
        self._bytes += int(columns["bytes"])
        if TOKENS in parts and self.texts is not None:
            new = {token for sequence in rollout.sequences or () for token in sequence.ids} - self._known
            found = self.texts.of(new)
            database.executemany("INSERT OR IGNORE INTO token_texts VALUES (?, ?)", found.items())
            self._known |= new

    def _annotate(
        self,
        database: sqlite3.Connection,
        session_id: str,
        columns: dict[str, Any],
        added: Mapping[int, Mapping[str, Any]],
    ) -> None:
        found = database.execute("SELECT id, bytes FROM rollouts WHERE session_id = ?", (session_id,)).fetchone()
        if found is None:
            return
        row, size = found
        part = database.execute("SELECT data FROM parts WHERE rollout = ? AND name = ?", (row, TOKENS)).fetchone()
        if added and part is not None:
            sequences = [TokenSequence.decoded(value) for value in unpack(part[0])]
            for index, facts in added.items():
                length = len(sequences[index].ids)  # what comes from a padded batch may be longer
                for name, value in facts.items():
                    setattr(sequences[index], name, value[:length] if isinstance(value, Sequence) else value)
            data = pack([sequence.encoded() for sequence in sequences])
            database.execute("UPDATE parts SET data = ? WHERE rollout = ? AND name = ?", (data, row, TOKENS))
            numbers = numbers_of(sequences)
            columns |= {n: numbers[n] for n in ("gap_max", "gap_mean", "entropy_mean") if numbers[n] is not None}
            columns["bytes"] = size + len(data) - len(part[0])
            self._bytes += len(data) - len(part[0])
        if columns:
            sets = ", ".join(f"{name} = ?" for name in columns)
            if "advantage" in columns and "gradient_tokens" not in columns:
                sets += f", gradient_tokens = trained_tokens * {int(columns['advantage'] != 0)}"
            database.execute(f"UPDATE rollouts SET {sets} WHERE id = ?", (*columns.values(), row))

    def _forget(self, database: sqlite3.Connection, which: str, values: tuple[Any, ...]) -> None:
        rows = [row[0] for row in database.execute(which, values)]
        for row in rows:
            self._bytes -= database.execute("SELECT bytes FROM rollouts WHERE id = ?", (row,)).fetchone()[0]
            for table in ("parts", "tools", "numbers", "searched"):
                database.execute(f"DELETE FROM {table} WHERE rollout = ?", (row,))
            database.execute("DELETE FROM rollouts WHERE id = ?", (row,))

    def _shrink(self, database: sqlite3.Connection) -> None:
        """Beyond the limit, give up parts of the oldest rollouts. Their room is used again by those that come."""
        if self._bytes <= self._limit:
            return
        for name in _PARTS:
            oldest = database.execute(
                "SELECT parts.id, rollout, LENGTH(data) FROM parts WHERE name = ? ORDER BY rollout", (name,)
            ).fetchall()
            for part, row, size in oldest:
                if self._bytes <= 0.9 * self._limit:
                    return
                database.execute("DELETE FROM parts WHERE id = ?", (part,))
                dropped = "COALESCE(dropped || ' ', '') || ?"
                database.execute(
                    f"UPDATE rollouts SET bytes = bytes - ?, dropped = {dropped} WHERE id = ?", (size, name, row)
                )
                self._bytes -= size
