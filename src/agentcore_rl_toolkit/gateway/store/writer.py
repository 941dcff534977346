"""Writes a store: all records of one pass of the event loop are one transaction.

A call waits for its transaction (`Store.kept`) before its agent gets the last byte of the reply. A committed transaction outlives
the process, however that ends. It outlives a loss of power once the system has written it; with ``fsync`` each commit waits for
that. The file is whole after either.

Commits run on the event loop: they write to the system's page cache and cost tens of microseconds; with ``fsync`` they take the
disk's time. Checkpoints run in a thread. A commit that meets the end of one is tried again.

When the disk refuses a commit, its calls are dropped, and their agents get the error. All else stays in memory for another
attempt: sessions that were opened, closed or deleted, and the gateway's settings. So calls and new sessions are refused on a
full disk, and work again when there is room.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import logging
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ..._servers.locks import close_in_children
from ...errors import ConfigError
from ..capture.record import CallRecord, encode
from .reader import Reader
from .schema import DELETE_SESSION, FILE, INSERT_CALL, PAGE_BYTES, PUT_SESSION, Row, connect, trouble

log = logging.getLogger(__name__)

_PROBE_BYTES = 64 * 2**10  # bytes that a full disk must store before it counts as free again
_LOCKED_S = 5.0  # calls are refused if another program locks the file for longer
_REST_S = 0.02  # pause between attempts at a locked file
_SLICE_S = 0.02  # time of `tend` for removals: the loop has other work
_READ_BYTES = 2**20  # bytes that a thread reads at a time
_FETCH_S = 600.0  # removals wait for the fetches that began before the deletion, for this long
_PRIVATE = "agentcore-rl-calls-"  # a directory of a private store
_NEW_S = 60.0  # a private store is not removed before this age

WAL_BYTES = 128 * 2**20  # a longer write-ahead log is moved into the file; four times as often costs a call 5%


class Store:
    """The store of one gateway. ``directory`` None: a private one, which `close` removes. ``reader`` belongs to the event loop.

    ``failed`` is the reason why the disk refuses calls now. ``removing`` are deleted sessions with calls in the store, and
    when they were deleted.
    Belongs to one event loop. Raises: ConfigError when another gateway has the directory, or it holds no usable store.
    """

    def __init__(self, directory: Path | None, *, fsync: bool = False) -> None:
        self._private = None if directory is not None else _private()
        directory = directory or self._private
        assert directory is not None
        self.path = directory / FILE
        self.failed: str | None = None
        self._lock = _hold(directory)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files get this mode
        try:
            self._database = connect(self.path)
            self._database.execute("PRAGMA busy_timeout=0")  # the loop does not wait for other programs
            self._database.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
            self.reader = Reader(connect(self.path, read_only=True), self.path)
            self.for_threads = Reader(connect(self.path, read_only=True), self.path)
            deleted = self._database.execute("SELECT DISTINCT session FROM calls EXCEPT SELECT number FROM sessions")
            self.removing = deque((number, 0.0) for (number,) in deleted)
            self.next_call = 1 + self._number("SELECT max(number) FROM calls")
            last = "SELECT max(number) FROM (SELECT number FROM sessions UNION SELECT max(session) FROM calls)"
            self.next_session = 1 + self._number(last)
        except (sqlite3.Error, ConfigError) as e:
            self._lock.close()
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(trouble(e, self.path)) from e
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: list[tuple[Row, Any]] = []  # rows, with their sessions
        self._writes: dict[tuple[str, Any], tuple[str, Row]] = {}  # all else, by table and key: the last one counts
        self._waiting: list[asyncio.Future[str | None]] = []  # resolved when all is committed or refused
        self._scheduled = False
        self._reads: list[float] = []  # when the running fetches began
        self._checkpoint: asyncio.Task[None] | None = None
        self._locked_since = 0.0

    def _number(self, sql: str) -> int:
        return int(self._database.execute(sql).fetchone()[0] or 0)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    # -- what is to be stored

    def append(self, session: Any, record: CallRecord) -> int:
        """Store a call of a session, which counts it. Returns its number."""
        number = self.next_call
        self.next_call += 1
        session.records += 1
        session.last_call_s = record.finished_s
        payload = encode(record)
        about = record.index, record.status, record.digest, record.call_id, record.delivered
        row = number, session.number, *about, payload, zlib.crc32(memoryview(payload)[:-1])
        self._calls.append((row, session))
        self._schedule()
        return number

    def put_session(self, *row: Any) -> None:
        """Store a session as it is now: the columns of `sessions`."""
        self._write("sessions", row[0], PUT_SESSION, row)

    def delete_session(self, number: int) -> None:
        """Delete a session with the next commit. Its calls are removed by `tend`, a few at a time."""
        self._write("sessions", number, DELETE_SESSION, (number,))

    def deliver(self, call: int, *, whole: bool) -> None:
        """Store whether an agent has the whole reply of a call."""
        self._write("calls", call, "UPDATE calls SET delivered = ? WHERE number = ?", (whole, call))

    def set(self, name: str, value: Any) -> None:
        """Store a setting of the gateway."""
        self._write("settings", name, "INSERT OR REPLACE INTO settings VALUES(?,?)", (name, value))

    def _write(self, table: str, key: Any, sql: str, values: Row) -> None:
        self._writes[table, key] = sql, values
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self.commit)

    # -- storing it

    def commit(self) -> None:
        """Commit the queue."""
        self._scheduled = False
        calls, self._calls = self._calls, []
        if not (calls or self._writes or self._waiting):
            return
        try:
            with self._database:  # which commits, or rolls back
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(INSERT_CALL, [row for row, _ in calls])
                for sql, values in self._writes.values():
                    self._database.execute(sql, values)
        except sqlite3.Error as e:
            self._failed(calls, e)
            return
        self._locked_since = 0.0
        now = time.monotonic()
        self.removing.extend((key, now) for (_, key), (sql, _) in self._writes.items() if sql is DELETE_SESSION)
        self._writes.clear()
        if self.failed is not None:
            log.warning("the gateway's store takes calls again")
            self.failed = None
            self.set("probe", None)
        self._report(None)

    def _failed(self, calls: list[tuple[Row, Any]], error: sqlite3.Error) -> None:
        """Handle a refused transaction: try again if the file is locked, otherwise refuse the calls."""
        locked = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
        if locked and self._loop is not None:
            now = time.monotonic()
            self._locked_since = self._locked_since or now
            if now - self._locked_since < _LOCKED_S:
                self._calls = calls
                self._loop.call_later(_REST_S, self.commit)
                return
        if self.failed is None:
            log.error("storing calls failed: %s", trouble(error, self.path))
        self.failed = trouble(error, self.path)
        for _, session in calls:
            session.refuse()
        self._report(self.failed)

    def _report(self, error: str | None) -> None:
        """Report the end of a commit to all who wait for it."""
        waiting, self._waiting = self._waiting, []
        for committed in waiting:
            if not committed.done():
                committed.set_result(error)

    def kept(self) -> asyncio.Future[str | None]:
        """Wait until everything appended so far is committed (with ``fsync``: on the disk). Returns why it is not."""
        committed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        if self._calls or self._writes or self._waiting:
            self._waiting.append(committed)
            self._schedule()
        else:
            committed.set_result(None)
        return committed

    async def read(self, of: Callable[[Reader], Iterator[bytes]]) -> AsyncGenerator[bytes, None]:
        """Yield the output of an iterator over committed calls, piece by piece, from threads. Raises: GatewayError."""
        pieces = _pieces(of(self.for_threads))
        began = time.monotonic()
        self._reads.append(began)
        try:
            while piece := await asyncio.to_thread(next, pieces, b""):
                yield piece
        finally:
            self._reads.remove(began)

    # -- now and then

    def tend(self) -> None:
        """Try a disk that refused again, remove calls of deleted sessions, and move a long log into the file."""
        if self.failed is not None:
            self.set("probe", bytes(_PROBE_BYTES))
            self.commit()
        if self._checkpoint is None or self._checkpoint.done():
            if self._log_bytes > WAL_BYTES and self._loop is not None:
                self._checkpoint = self._loop.create_task(asyncio.to_thread(self._move_log))
            elif self.removing and self.failed is None:
                self._remove_deleted()

    def _remove_deleted(self) -> None:
        """Remove calls of deleted sessions for some milliseconds. Their space is used again."""
        now, done = time.monotonic(), 0
        oldest = min((began for began in self._reads if began > now - _FETCH_S), default=now)
        one = "DELETE FROM calls WHERE number = (SELECT number FROM calls WHERE session = ? LIMIT 1)"
        try:
            with self._database:  # one transaction: with ``fsync`` each waits for the disk
                self._database.execute("BEGIN IMMEDIATE")
                while done < len(self.removing) and time.monotonic() < now + _SLICE_S:
                    number, deleted = self.removing[done]
                    if deleted >= oldest:
                        break
                    done += not self._database.execute(one, (number,)).rowcount
        except sqlite3.Error as e:
            log.error("deleted calls could not be removed (they are removed later): %s", trouble(e, self.path))
            return
        for _ in range(done):
            self.removing.popleft()

    def _move_log(self) -> None:
        """Move the write-ahead log into the file. Runs in a thread."""
        try:
            with closing(connect(self.path)) as database:
                database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most of the log, while commits continue
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                # The first write of a log waits for the disk. This thread may wait.
                database.execute("UPDATE meta SET value = value WHERE name = 'format'")
        except sqlite3.Error as e:
            log.error("moving the write-ahead log into the store failed: %s", trouble(e, self.path))

    @property
    def _log_bytes(self) -> int:
        log_file = self.path.with_name(FILE + "-wal")
        return log_file.stat().st_size if log_file.exists() else 0

    @property
    def total_bytes(self) -> int:
        """Return the size of the store on disk."""
        return self._number("PRAGMA page_count") * PAGE_BYTES + self._log_bytes

    @property
    def queue_depth(self) -> int:
        return len(self._calls)

    async def stop(self) -> None:
        """Store everything, then `close`."""
        if self._checkpoint is not None:
            await self._checkpoint  # it locks the file
        self.close()

    def close(self) -> None:
        self._loop = None
        self.commit()
        self.for_threads.close()
        self.reader.close()
        self._database.close()  # which moves the write-ahead log into the file
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        self._lock.close()


def _pieces(items: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes in pieces of one to two megabytes: a larger copy would hold the interpreter's lock for long."""
    piece = bytearray()
    for item in items:
        for at in range(0, len(item), _READ_BYTES):
            piece += memoryview(item)[at : at + _READ_BYTES]
            if len(piece) >= _READ_BYTES:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)


def _private() -> Path:
    """Return a new directory for a private store. The directories of gateways that were killed are removed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PRIVATE}*/lock"):
        with suppress(OSError, ConfigError):
            if time.time() - lock.stat().st_mtime < _NEW_S:
                continue  # another gateway may have created its lock, and not taken it yet
            held = _hold(lock.parent)
            shutil.rmtree(lock.parent)
            held.close()
    return Path(tempfile.mkdtemp(prefix=_PRIVATE))


def _hold(directory: Path) -> io.FileIO:
    """Lock a directory for one gateway, and return the lock's file. Raises: ConfigError if another has the lock."""
    directory.mkdir(parents=True, exist_ok=True)
    file = io.FileIO(os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    close_in_children(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        raise ConfigError(f"{directory} is in use by another gateway; give each its own --store") from e
    return file
