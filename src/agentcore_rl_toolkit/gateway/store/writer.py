"""Writes a store: all records of one pass of the event loop are one transaction.

A call waits for its transaction (`Store.kept`) before its agent gets the last byte of the reply. A committed transaction outlives
the process, however that ends. It outlives a loss of power once the system has written it; with ``fsync`` each commit waits for
that. The file is whole after either.

Commits run on the event loop: they write to the system's page cache and cost tens of microseconds; with ``fsync`` they take the
disk's time. Checkpoints run in a thread (`WriteAheadLog`). A commit that meets the end of one is tried again.

When the disk refuses a commit, its calls are dropped, and their agents get the error. All else stays in memory for another
attempt: sessions that were opened, closed or deleted, and the gateway's settings. So calls and new sessions are refused on a
full disk, and work again when there is room.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..capture.record import CallRecord, encode
from .reader import Reader
from .schema import FILE, INSERT_CALL, PAGE_BYTES, PUT_SESSION, Row, connect, create, os_error, trouble

log = logging.getLogger(__name__)

_PROBE_BYTES = 64 * 2**10  # bytes that a full disk must store before it counts as free again
_LOCKED_S = 5.0  # calls are refused if another program locks the file for longer
_REST_S = 0.02  # pause between attempts at a locked file, and between removals
_SLICE_S = 0.005  # time per removal: the loop has other work
_REMOVED_AT_ONCE = 8  # a call of some megabytes takes a millisecond
_READ_BYTES = 2**20  # bytes that a thread reads at a time
_PRIVATE = "agentcore-rl-calls-"  # a directory of a private store

WAL_BYTES = 128 * 2**20  # a longer write-ahead log is moved into the file; four times as often costs a call 5%


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit all statements of the block together, or none of them."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
        raise


class WriteAheadLog:
    """The log of a store's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.longest_bytes = WAL_BYTES
        self._task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        try:
            return self._path.with_name(self._path.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def moving(self) -> bool:
        return self._task is not None and not self._task.done()

    def tend(self) -> None:
        """Move the log into the file, if it is long."""
        if not self.moving and self.size > self.longest_bytes:
            self._task = asyncio.get_running_loop().create_task(self._checkpoint())

    async def _checkpoint(self) -> None:
        try:
            await asyncio.to_thread(self._move)
        except sqlite3.Error as e:
            log.error("moving the write-ahead log into the store failed: %s", trouble(e, self._path))

    def _move(self) -> None:
        with closing(connect(self._path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most of the log, while commits continue
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            # The first write of a log waits for the disk. This thread may wait.
            database.execute("UPDATE meta SET value = value WHERE name = 'format'")

    async def finish(self) -> None:
        """Wait for a running checkpoint."""
        if self._task is not None:
            await self._task


class Store:
    """The store of one gateway. ``directory`` None: a private one, which `close` removes. ``reader`` belongs to the event loop.

    ``failed`` is the reason why the disk refuses calls now. ``on_refused`` runs for every call that was refused, with
    its session. ``removing`` are deleted sessions whose calls are still to be removed.
    Belongs to one event loop. Raises: ConfigError when another gateway has the directory, or it holds no usable store.
    """

    def __init__(self, directory: Path | None, *, fsync: bool = False) -> None:
        self._private = None if directory is not None else _private()
        directory = directory or self._private
        assert directory is not None
        self.path = directory / FILE
        self.failed: OSError | None = None
        self.on_refused: Callable[[Any], None] | None = None
        self._lock = _hold(directory)
        try:
            create(directory)
            self._database = connect(self.path)
            self._database.execute("PRAGMA busy_timeout=0")  # the loop does not wait for other programs
            self._database.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
            self.reader = Reader(connect(self.path, read_only=True), self.path)
            self.for_threads = Reader(connect(self.path, read_only=True), self.path, self.reader.damaged)
            self.wal = WriteAheadLog(self.path)
            self.removing = deque(n for (n,) in self._database.execute("SELECT session FROM deleted"))
            self.first_call = self.next_call = 1 + self._number("SELECT max(number) FROM calls")
            self.next_session = 1 + max(
                self._number("SELECT max(number) FROM sessions"),
                self._number("SELECT max(session) FROM calls"),
                self._number("SELECT max(session) FROM deleted"),
            )
        except sqlite3.Error as e:
            raise ConfigError(trouble(e, self.path)) from e
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: list[tuple[Row, Any]] = []  # rows, with their sessions, which have a `number`
        self._writes: dict[tuple[str, Any], tuple[str, Row]] = {}  # all else, by table and key: the last one counts
        self._waiting: list[asyncio.Future[OSError | None]] = []  # resolved when all is committed or refused
        self._scheduled = False
        self._tidying: asyncio.Task[None] | None = None
        self._locked_since = 0.0

    def _number(self, sql: str) -> int:
        return int(self._database.execute(sql).fetchone()[0] or 0)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tidy()

    # -- what is to be stored

    def append(self, session: Any, record: CallRecord) -> int:
        """Store a call. Returns its number."""
        number = self.next_call
        self.next_call += 1
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
        """Delete a session with the next commit; its calls are removed a few at a time."""
        self._write("sessions", number, "DELETE FROM sessions WHERE number = ?", (number,))
        self._write("deleted", number, "INSERT OR IGNORE INTO deleted VALUES(?)", (number,))

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

    def commit(self, *, probe: bool = False) -> None:
        """Commit the queue. After a refusal of the disk only ``probe`` tries again."""
        self._scheduled = False
        calls, self._calls = self._calls, []
        if not (calls or self._writes or self._waiting):
            return
        if self.failed is not None and not probe:
            self._refuse(calls, self.failed)
            return
        try:
            with transaction(self._database):
                self._database.executemany(INSERT_CALL, [row for row, _ in calls])
                for sql, values in self._writes.values():
                    self._database.execute(sql, values)
        except sqlite3.Error as e:
            self._failed(calls, e)
            return
        self._locked_since = 0.0
        self.removing.extend(key for table, key in self._writes if table == "deleted")
        self._writes.clear()
        self._tidy()
        if self.failed is not None:
            log.warning("the gateway's store takes calls again")
            self.failed = None
            self.set("probe", None)
        self._report(None)

    def _failed(self, calls: list[tuple[Row, Any]], error: sqlite3.Error) -> None:
        """Handle a refused transaction: try again if the file is locked, otherwise refuse the calls."""
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and self._loop is not None:
            now = time.monotonic()
            self._locked_since = self._locked_since or now
            if now - self._locked_since < _LOCKED_S:
                self._calls[:0] = calls
                self._loop.call_later(_REST_S, self.commit)
                return
        if self.failed is None:
            log.error("storing calls failed: %s", trouble(error, self.path))
        self.failed = os_error(error, self.path)
        self._refuse(calls, self.failed)

    def _refuse(self, calls: list[tuple[Row, Any]], error: OSError) -> None:
        for _, session in calls:
            if self.on_refused is not None:
                self.on_refused(session)
        self._report(error)

    def _report(self, error: OSError | None) -> None:
        """Report the end of a commit to all who wait for it."""
        waiting, self._waiting = self._waiting, []
        for committed in waiting:
            if not committed.done():
                committed.set_result(error)

    def kept(self) -> asyncio.Future[OSError | None]:
        """Wait until everything appended so far is committed (with ``fsync``: on the disk). Returns why it is not."""
        committed: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        if self._calls or self._writes or self._waiting:
            self._waiting.append(committed)
            self._schedule()
        else:
            committed.set_result(None)
        return committed

    async def read(self, of: Callable[[Reader], Iterator[bytes]]) -> AsyncIterator[bytes]:
        """Yield the output of an iterator over committed calls, piece by piece, from threads. Raises: GatewayError."""
        pieces = _pieces(of(self.for_threads))
        while piece := await asyncio.to_thread(next, pieces, b""):
            yield piece

    # -- now and then

    def tend(self) -> None:
        """Try a disk that refused again, also without new calls; and remove the calls of deleted sessions."""
        if self.failed is not None:
            self.set("probe", bytes(_PROBE_BYTES))
            self.commit(probe=True)
        self._tidy()
        self.wal.tend()

    def _tidy(self) -> None:
        """Remove the calls of deleted sessions, some at a time."""
        if self._loop is not None and self.removing and (self._tidying is None or self._tidying.done()):
            self._tidying = self._loop.create_task(self._remove())

    async def _remove(self) -> None:
        try:
            while self.removing and self.failed is None and self._loop is not None:
                until = time.monotonic() + _SLICE_S
                while self.removing and not self.wal.moving and time.monotonic() < until:
                    self._remove_some(self.removing[0])
                await asyncio.sleep(_REST_S)
        except sqlite3.Error as e:
            log.error("deleted calls could not be removed (they are removed later): %s", trouble(e, self.path))

    def _remove_some(self, session: int) -> None:
        """Remove some calls of a deleted session; their space is used again. Raises: sqlite3.Error."""
        database = self._database
        some = f"(SELECT number FROM calls WHERE session = ? LIMIT {_REMOVED_AT_ONCE})"
        with transaction(database):
            count = database.execute(f"DELETE FROM calls WHERE number IN {some}", (session,)).rowcount
            if count < _REMOVED_AT_ONCE:
                database.execute("DELETE FROM deleted WHERE session = ?", (session,))
        if count < _REMOVED_AT_ONCE:
            self.removing.popleft()

    @property
    def total_bytes(self) -> int:
        """Return the size of the store on disk."""
        return self._number("PRAGMA page_count") * PAGE_BYTES + self.wal.size

    @property
    def queue_depth(self) -> int:
        return len(self._calls)

    async def stop(self) -> None:
        """Store everything, then `close`."""
        await self.wal.finish()  # a checkpoint locks the file
        self.close()

    def close(self) -> None:
        self._loop = None
        self.commit(probe=True)
        self.for_threads.close()
        self.reader.close()
        self._database.close()  # which moves the write-ahead log into the file
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        os.close(self._lock)


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
            held = _hold(lock.parent)
            shutil.rmtree(lock.parent)
            os.close(held)
    return Path(tempfile.mkdtemp(prefix=_PRIVATE))


def _hold(directory: Path) -> int:
    """Lock a directory for one gateway, and return the lock's descriptor. Raises: ConfigError if another has the lock."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        raise ConfigError(f"{directory} is in use by another gateway; give each its own --store") from e
    return fd
