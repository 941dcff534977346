"""The write-ahead log of a store: syncing it to the disk, and moving it into the file (a checkpoint). Both run in a thread.

A commit that meets the end of a checkpoint finds the file locked, and is tried again a moment later (`store.writer`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from .queue import QueuedCall
from .schema import connect, trouble

log = logging.getLogger(__name__)

WAL_BYTES = 32 * 2**20  # a write-ahead log longer than this is moved into the file


class WriteAheadLog:
    """See the module. ``path`` None: the store is a private file, which has none. Raises: OSError."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = None if path is None else os.open(f"{path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.longest_bytes = WAL_BYTES
        self.checkpoints = 0
        self.moving = False
        self._syncing = False
        self._unsynced: list[QueuedCall] = []
        self._thread = ThreadPoolExecutor(1, "gateway-store")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def size(self) -> int:
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    @property
    def unsynced(self) -> int:
        """How many calls wait for the disk."""
        return len(self._unsynced)

    async def sync(self) -> None:
        """Return when what is committed is on the disk. Raises: OSError."""
        if self._fd is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, os.fsync, self._fd)

    def sync_soon(self, calls: list[QueuedCall], lost: Callable[[list[QueuedCall], OSError], None]) -> None:
        """Tell calls when they are on the disk; those that it refused go to `lost`."""
        self._unsynced += calls
        if not self._syncing:
            self._syncing = True
            self._run(self._sync(lost))

    async def _sync(self, lost: Callable[[list[QueuedCall], OSError], None]) -> None:
        try:
            while self._unsynced:
                calls, self._unsynced = self._unsynced, []
                try:
                    await self.sync()
                except OSError as e:
                    calls += self._unsynced  # they may go on from those
                    self._unsynced = []
                    lost(calls, e)
                    continue
                for call in calls:
                    if call.done is not None:
                        call.done(None)
        finally:
            self._syncing = False

    def tend(self) -> None:
        """Move the log into the file, if it is long."""
        if not self.moving and self.size > self.longest_bytes:
            self.moving = True
            self._run(self._checkpoint())

    async def _checkpoint(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._move)
            self.checkpoints += 1
        except sqlite3.Error as e:
            log.error("moving the write-ahead log into the store failed: %s", trouble(e, self._path))
        finally:
            self.moving = False

    def _move(self) -> None:
        with closing(connect(self._path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most of it, beside commits
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Return when nothing is under way in the thread."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        self._thread.shutdown()
        if self._fd is not None:
            os.close(self._fd)
