"""Writes a store: what arrives in one pass of the event loop is committed as one transaction.

A call's callback runs when its transaction is committed, and lets its agent have the last byte of the reply. A committed
transaction outlives the process, however that ends. It outlives a loss of power once the system has written it; with
``fsync`` the callbacks wait for that. The file is whole after either.

Commits run on the event loop: they write to the system's page cache and cost tens of microseconds. What can take long runs
in a thread: syncing, and moving the write-ahead log into the file (a checkpoint). For the last part of a checkpoint commits
wait, the loop does not.

What the disk refuses is dropped if it is a call, whose callback learns that, and kept in memory for another try if it is
anything else: sessions that were opened, closed or deleted, and the gateway's own settings. So calls and new sessions are
refused on a full disk, and all goes on when there is room.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...errors import ConfigError
from ..capture.record import CallRecord
from .reader import Reader, failure
from .schema import FILE, INSERT_CALL, INSERT_CHOICE, PUT_SESSION, call_row, connect, create, os_error, trouble

log = logging.getLogger(__name__)

Done = Callable[[OSError | None], None]

WAL_BYTES = 32 * 2**20  # a write-ahead log longer than this is moved into the file
_RETRY_S = 0.1  # how soon a disk that refused is tried again
_LOCKED_S = 5.0  # how long another program may hold the file before calls are refused
_PROBE_BYTES = 64 * 2**10  # what a disk that refused must take before it counts as one with room
_SLOW_S = 0.02
_TIDY_S = 0.005  # deleted calls are removed for so long at a time,
_REST_S = 0.02  # with such pauses
_REMOVED_AT_ONCE = 64
_SPARE = 0.1  # share of the file that may be free before its end is given back
_SPARE_PAGES = 64
_GIVEN_BACK_AT_ONCE = 64  # pages


class Numbered(Protocol):
    """What the store knows of a session: its number."""

    @property
    def number(self) -> int: ...


class _Call(NamedTuple):
    """A call that is to be stored."""

    row: tuple[Any, ...]
    more: list[tuple[Any, ...]]
    session: Numbered
    record: CallRecord
    done: Done | None


class Store:
    """The store of one gateway. ``directory`` None: a private file that ends with the process.

    Belongs to one event loop. Raises: ConfigError when another gateway has the directory, or it holds no usable store.
    """

    def __init__(self, directory: Path | None, *, fsync: bool = False) -> None:
        self.directory = directory
        self.path = None if directory is None else directory / FILE
        self.fsync = fsync and directory is not None
        self.wal_bytes = WAL_BYTES
        self.failed: OSError | None = None
        # Runs for every call that was refused: its session, and whether the last one stored of that session was refused too.
        self.on_refused: Callable[[Any, bool], None] | None = None
        self.appended = 0
        self.slow_commits = 0
        self.checkpoints = 0
        self._lock = None if directory is None else _hold(directory)
        self._wal: int | None = None
        try:
            if directory is not None:
                create(directory)
            self._database = connect(self.path)
            self._database.execute("PRAGMA busy_timeout=0")  # the loop does not wait for other programs
            if self.path is None:
                self.reader = Reader(self._database, None)
            else:
                self.reader = Reader(connect(self.path, read_only=True), self.path)
                self._wal = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.first_call = self.next_call = 1 + self._greatest("SELECT max(number) FROM calls")
            self.next_session = 1 + max(
                self._greatest("SELECT max(number) FROM sessions"),
                self._greatest("SELECT max(session) FROM calls"),
                self._greatest("SELECT max(session) FROM deleted"),
            )
            self._removing = deque(number for (number,) in self._database.execute("SELECT session FROM deleted"))
        except sqlite3.Error as e:
            raise ConfigError(trouble(e, self.path)) from e
        self._page_bytes: int = self._database.execute("PRAGMA page_size").fetchone()[0]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ThreadPoolExecutor(1, "gateway-store")
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: list[_Call] = []
        self._sessions: dict[int, tuple[Any, ...]] = {}
        self._deleted: dict[int, None] = {}
        self._delivered: dict[int, bool] = {}
        self._settings: dict[str, Any] = {}
        self._versions: list[tuple[int | None, str | None, float]] = []
        self._refused: dict[int, tuple[int, CallRecord]] = {}  # by session: how many calls, the first
        self._after: list[Done] = []  # run when all of the above is committed, or was refused
        self._unsynced: list[list[_Call]] = []
        self._syncing = False
        self._scheduled = False
        self._checkpointing = False
        self._held = False  # commits wait for the end of a checkpoint
        self._tidying = False
        self._retry_at = self._locked_since = 0.0

    def _greatest(self, sql: str) -> int:
        return int(self._database.execute(sql).fetchone()[0] or 0)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tidy()

    # -- what is to be stored

    def append(self, session: Numbered, record: CallRecord, done: Done | None = None, *, alone: bool = False) -> int:
        """Store a call; `done` runs once it is committed, or was refused. Returns its number.

        With ``alone`` no others are to be expected in this pass of the loop: it is committed at once.
        """
        number = self.next_call
        self.next_call += 1
        self._calls.append(_Call(*call_row(number, session.number, record), session, record, done))
        self.appended += 1
        if alone:
            self.commit()
        else:
            self._schedule()
        return number

    def put_session(self, *row: Any) -> None:
        """Store a session as it is now: the columns of `sessions`."""
        self._sessions[row[0]] = row
        self._schedule()

    def delete_session(self, number: int) -> None:
        """Forget a session. It is gone with the next commit, its calls are removed by and by."""
        self._sessions.pop(number, None)
        self._refused.pop(number, None)
        self._deleted[number] = None
        self._schedule()

    def withdraw(self, number: int) -> None:
        """A session that the disk refused is not to be stored any more."""
        self._sessions.pop(number, None)

    def owes(self, number: int) -> bool:
        """Whether the session is not stored as it is now."""
        return number in self._sessions

    def deliver(self, call: int, *, whole: bool) -> None:
        """Store whether an agent has the whole reply of a call."""
        self._delivered[call] = whole
        self._schedule()

    def set(self, name: str, value: Any) -> None:
        """Store a setting of the gateway."""
        self._settings[name] = value
        self._schedule()

    def publish(self, weight_version: int | None, sampler: str | None) -> None:
        """Store that other weights answer from now on."""
        self._versions.append((weight_version, sampler, time.time()))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self.commit)

    # -- storing it

    def commit(self) -> None:
        """Store what is queued."""
        self._scheduled = False
        if self._held or not self._queued:
            return
        calls, self._calls = self._calls, []
        if self.failed is not None and time.monotonic() < self._retry_at:
            self._refuse(calls, self.failed)
            return
        started = time.monotonic()
        try:
            self._write(calls)
        except sqlite3.Error as e:
            self._failed(calls, e)
        except (ValueError, OverflowError) as e:
            self._one_by_one(calls, e)
        else:
            self._stored(calls)
        if time.monotonic() - started > _SLOW_S:
            self.slow_commits += 1

    @property
    def _queued(self) -> bool:
        return bool(
            self._calls
            or self._sessions
            or self._deleted
            or self._delivered
            or self._settings
            or self._versions
            or self._refused
            or self._after
        )

    def _write(self, calls: list[_Call], *, probe: bool = False) -> None:
        """One transaction. Raises: sqlite3.Error, ValueError, OverflowError, which leave everything as it was."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            if self._sessions:
                database.executemany(PUT_SESSION, self._sessions.values())
            if self._deleted:
                numbers = [(number,) for number in self._deleted]
                database.executemany("DELETE FROM sessions WHERE number = ?", numbers)
                database.executemany("INSERT OR IGNORE INTO deleted VALUES(?)", numbers)
            refused = self._refused_rows()
            rows = [call.row for call in calls] + refused
            if rows:
                database.executemany(INSERT_CALL, rows)
            for call in calls:
                if call.more:
                    database.executemany(INSERT_CHOICE, call.more)
            if self._delivered:
                database.executemany(
                    "UPDATE calls SET delivered = ? WHERE number = ?",
                    [(whole, number) for number, whole in self._delivered.items()],
                )
            if self._settings:
                database.executemany("INSERT OR REPLACE INTO settings VALUES(?,?)", self._settings.items())
            if self._versions:
                database.executemany("INSERT INTO versions VALUES(NULL,?,?,?)", self._versions)
            if probe:
                database.execute("INSERT OR REPLACE INTO settings VALUES('probe', zeroblob(?))", (_PROBE_BYTES,))
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
            raise

    def _refused_rows(self) -> list[tuple[Any, ...]]:
        """Of each session that lacks calls a failure that says so."""
        rows = []
        for session, (count, first) in self._refused.items():
            some = "this call; its agent was told so" if count == 1 else f"{count} calls; their agents were told so"
            told = failure(
                first.call_id, first.index, f"the gateway's disk failed to take {some}", at_s=first.started_s
            )
            rows.append(call_row(self.next_call, session, told)[0])
            self.next_call += 1
        return rows

    def _stored(self, calls: list[_Call]) -> None:
        self._locked_since = 0.0
        self._sessions.clear()
        if self._deleted:
            self._removing.extend(self._deleted)
            self._deleted.clear()
            self._tidy_soon()
        self._delivered.clear()
        self._settings.clear()
        self._versions.clear()
        self._refused.clear()
        if self.failed is not None:
            log.warning("the gateway's store takes calls again")
            self.failed = None
        after, self._after = self._after, []
        if self.fsync and self._loop is not None:
            self._unsynced.append(calls)
            self._sync_soon()
        else:
            for call in calls:
                if call.done is not None:
                    call.done(None)
        for done in after:
            done(None)
        self._checkpoint_soon()

    def _failed(self, calls: list[_Call], error: sqlite3.Error) -> None:
        """A transaction was refused."""
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        now = time.monotonic()
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and self._loop is not None:
            self._locked_since = self._locked_since or now
            if now - self._locked_since < _LOCKED_S:
                self._calls[:0] = calls
                self._loop.call_later(_REST_S, self.commit)
                return
        elif isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | sqlite3.ProgrammingError):
            self._one_by_one(calls, error)
            return
        if self.failed is None:
            log.error("storing calls failed: %s", trouble(error, self.path))
        self.failed = os_error(error, self.path)
        self._retry_at = now + _RETRY_S
        self._refuse(calls, self.failed)

    def _one_by_one(self, calls: list[_Call], error: Exception) -> None:
        """A call holds what no column can: it must not cost the others of its transaction."""
        if len(calls) <= 1:
            log.error("a call cannot be stored: %s", error)
            self._refuse(calls, OSError(errno.EINVAL, f"this call cannot be stored: {error}"))
            return
        for call in calls:
            self._calls.append(call)
            self.commit()

    def _refuse(self, calls: list[_Call], error: OSError) -> None:
        for call in calls:
            number = call.session.number
            count, first = self._refused.get(number, (0, call.record))
            if number not in self._deleted:
                self._refused[number] = (count + 1, first)
            if self.on_refused is not None:
                self.on_refused(call.session, count > 0)
            if call.done is not None:
                call.done(error)
        after, self._after = self._after, []
        for done in after:
            done(error)

    async def kept(self) -> OSError | None:
        """Return when everything appended so far is committed (with ``fsync``: on the disk), or why it is not."""
        if self.fsync:
            return await self.synced()
        return await self._committed()

    async def synced(self) -> OSError | None:
        """Return when everything appended so far is on the disk, or why it is not."""
        error = await self._committed()
        if error is None and self._wal is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, os.fsync, self._wal)
            except OSError as e:
                return e
        return error

    async def _committed(self) -> OSError | None:
        if not self._queued:
            return None
        committed: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        self._after.append(lambda error: None if committed.done() else committed.set_result(error))
        self._schedule()
        return await committed

    def tend(self) -> None:
        """Try a disk that refused again, though nobody appends; and give space back."""
        if self.failed is not None and time.monotonic() >= self._retry_at and not self._held:
            self._retry_at = time.monotonic() + _RETRY_S
            try:
                self._write([], probe=True)
            except (sqlite3.Error, ValueError, OverflowError):
                return
            self._stored([])
            with suppress(sqlite3.Error):
                self._database.execute("DELETE FROM settings WHERE name = 'probe'")
        if self.failed is None:
            self._tidy_soon()

    # -- syncing and checkpoints, in the thread

    def _run(self, work: Any) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sync_soon(self) -> None:
        if not self._syncing:
            self._syncing = True
            self._run(self._sync())

    async def _sync(self) -> None:
        assert self._loop is not None
        assert self._wal is not None
        try:
            while self._unsynced:
                batches, self._unsynced = self._unsynced, []
                try:
                    await self._loop.run_in_executor(self._thread, os.fsync, self._wal)
                except OSError as e:
                    batches += self._unsynced  # they may go on from those
                    self._unsynced = []
                    self._take_back([call for batch in batches for call in batch], e)
                    continue
                for call in (call for batch in batches for call in batch):
                    if call.done is not None:
                        call.done(None)
        finally:
            self._syncing = False

    def _take_back(self, calls: list[_Call], error: OSError) -> None:
        """These calls are committed, but their agents are told that they are not stored."""
        log.error("writing the gateway's store to its disk failed: %s", error)
        self.failed = error
        self._retry_at = time.monotonic() + _RETRY_S
        try:
            self._database.executemany("DELETE FROM calls WHERE number = ?", [(call.row[0],) for call in calls])
        except sqlite3.Error as e:
            log.error("taking back %d calls failed as well: %s", len(calls), trouble(e, self.path))
        self._refuse(calls, error)

    def _checkpoint_soon(self) -> None:
        """Move the write-ahead log into the file, if it is long."""
        if self._loop is not None and not self._checkpointing and self._wal_size() > self.wal_bytes:
            self._checkpointing = True
            self._run(self._checkpoint())

    async def _checkpoint(self) -> None:
        assert self._loop is not None
        try:
            await self._loop.run_in_executor(self._thread, self._move, "PASSIVE")
            self._held = True  # what was committed meanwhile is little: now it can be caught up with
            await self._loop.run_in_executor(self._thread, self._move, "TRUNCATE")
            self.checkpoints += 1
        except sqlite3.Error as e:
            log.error("moving the write-ahead log into the store failed: %s", trouble(e, self.path))
            await asyncio.sleep(_RETRY_S)
        finally:
            self._held = self._checkpointing = False
            self.commit()

    def _move(self, how: str) -> None:
        database = connect(self.path)
        try:
            database.execute("PRAGMA busy_timeout=0")
            database.execute(f"PRAGMA wal_checkpoint({how})").fetchall()
        finally:
            database.close()

    # -- space

    def _tidy_soon(self) -> None:
        if not self._tidying and self._loop is not None and (self._removing or self._spare_pages):
            self._tidying = True
            self._loop.call_later(_REST_S, self._tidy)

    @property
    def _spare_pages(self) -> int:
        """Free pages that are too many to keep."""
        pages, free = self._pages()
        return free if free > max(_SPARE_PAGES, pages * _SPARE) else 0

    def _pages(self) -> tuple[int, int]:
        [pages] = self._database.execute("PRAGMA page_count").fetchone()
        [free] = self._database.execute("PRAGMA freelist_count").fetchone()
        return pages, free

    def _tidy(self) -> None:
        """Remove calls of deleted sessions, and give free space back, for a moment."""
        self._tidying = False
        if self._loop is None:
            return
        until = time.monotonic() + _TIDY_S
        try:
            if not self._held and self.failed is None:
                while self._removing and time.monotonic() < until:
                    self.remove_some()
                if not self._removing and time.monotonic() < until and self._spare_pages:
                    # Not `execute`, which ends after the first page.
                    self._database.executescript(f"PRAGMA incremental_vacuum({_GIVEN_BACK_AT_ONCE})")
        except sqlite3.Error as e:
            log.error("removing deleted calls failed, and is tried again: %s", trouble(e, self.path))
            return
        self._checkpoint_soon()
        self._tidy_soon()

    @property
    def removing(self) -> bool:
        """Whether there are calls of deleted sessions."""
        return bool(self._removing)

    @property
    def deleting(self) -> bool:
        """Whether sessions were deleted that are not gone from the file yet."""
        return bool(self._deleted)

    def remove_some(self) -> None:
        """Remove some calls of deleted sessions. Raises: sqlite3.Error."""
        session, database = self._removing[0], self._database
        some = f"(SELECT number FROM calls WHERE session = ? LIMIT {_REMOVED_AT_ONCE})"
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute(f"DELETE FROM choices WHERE call IN {some}", (session,))
            count = database.execute(f"DELETE FROM calls WHERE number IN {some}", (session,)).rowcount
            if count < _REMOVED_AT_ONCE:
                database.execute("DELETE FROM deleted WHERE session = ?", (session,))
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
            raise
        if count < _REMOVED_AT_ONCE:
            self._removing.popleft()

    @property
    def used_bytes(self) -> int:
        """What sessions take: the file without its free pages."""
        pages, free = self._pages()
        return (pages - free) * self._page_bytes

    @property
    def total_bytes(self) -> int:
        """What the store takes."""
        return self._pages()[0] * self._page_bytes + self._wal_size()

    def _wal_size(self) -> int:
        return 0 if self._wal is None else os.fstat(self._wal).st_size

    @property
    def queue_depth(self) -> int:
        return len(self._calls) + sum(map(len, self._unsynced))

    async def stop(self) -> None:
        """Store everything, then `close`."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        self._loop, self._held = None, False
        if self._queued:
            self.commit()
        self._thread.shutdown()
        if self.path is not None:
            self.reader.close()
        self._database.close()  # which moves the write-ahead log into the file
        for fd in (self._wal, self._lock):
            if fd is not None:
                os.close(fd)


def _hold(directory: Path) -> int:
    """Hold a directory for one gateway; returns the descriptor that holds it. Raises: ConfigError when another does."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        raise ConfigError(f"{directory} is in use by another gateway; give each its own --store") from e
    return fd
