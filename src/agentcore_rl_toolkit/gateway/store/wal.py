"""The write-ahead log of a store: syncing it to the disk, and moving it into the file (a checkpoint). Both run in a thread.

For the last part of a checkpoint commits wait (``held``), the event loop does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .queue import QueuedCall
from .schema import connect, trouble

log = logging.getLogger(__name__)

WAL_BYTES = 32 * 2**20  # a write-ahead log longer than this is moved into the file
_RETRY_S = 0.1


class WriteAheadLog:
    """See the module. ``path`` None: the store is a private file, which has none. Raises: OSError."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = None if path is None else os.open(f"{path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.longest_bytes = WAL_BYTES
        self.checkpoints = 0
        self.held = False
        self._moving = self._syncing = False
        self._unsynced: list[list[QueuedCall]] = []
        self._thread = ThreadPoolExecutor(1, "gateway-store")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def size(self) -> int:
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    @property
    def unsynced(self) -> int:
        """How many calls wait for the disk."""
        return sum(map(len, self._unsynced))

    async def sync(self) -> None:
        """Return when what is committed is on the disk. Raises: OSError."""
        if self._fd is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, os.fsync, self._fd)

    def sync_soon(self, calls: list[QueuedCall], lost: Callable[[list[QueuedCall], OSError], None]) -> None:
        """Tell calls when they are on the disk; those that it refused go to `lost`."""
        self._unsynced.append(calls)
        if not self._syncing:
            self._syncing = True
            self._run(self._sync(lost))

    async def _sync(self, lost: Callable[[list[QueuedCall], OSError], None]) -> None:
        try:
            while self._unsynced:
                batches, self._unsynced = self._unsynced, []
                try:
                    await self.sync()
                except OSError as e:
                    batches += self._unsynced  # they may go on from those
                    self._unsynced = []
                    lost([call for batch in batches for call in batch], e)
                    continue
                for call in (call for batch in batches for call in batch):
                    if call.done is not None:
                        call.done(None)
        finally:
            self._syncing = False

    def move_soon(self, commit: Callable[[], None]) -> None:
        """Move the log into the file, if it is long; `commit` runs when commits need not wait any more."""
        if not self._moving and self.size > self.longest_bytes:
            self._moving = True
            self._run(self._checkpoint(commit))

    async def _checkpoint(self, commit: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._move, "PASSIVE")
            self.held = True  # what was committed meanwhile is little: now it can be caught up with
            await loop.run_in_executor(self._thread, self._move, "TRUNCATE")
            self.checkpoints += 1
        except sqlite3.Error as e:
            log.error("moving the write-ahead log into the store failed: %s", trouble(e, self._path))
            await asyncio.sleep(_RETRY_S)
        finally:
            self.held = self._moving = False
            commit()

    def _move(self, how: str) -> None:
        database = connect(self._path)
        try:
            database.execute("PRAGMA busy_timeout=0")
            database.execute(f"PRAGMA wal_checkpoint({how})").fetchall()
        finally:
            database.close()

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
