"""The write-ahead log of a store: syncing it to the disk, and moving it into the file (a checkpoint). Both run in a thread.

A commit that meets the end of a checkpoint finds the file locked, and is tried again a moment later (`store.writer`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

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
        self._thread = ThreadPoolExecutor(1, "gateway-store")
        self._task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    def tend(self) -> None:
        """Move the log into the file, if it is long."""
        if not self.moving and self.size > self.longest_bytes:
            self.moving = True
            self._task = asyncio.get_running_loop().create_task(self._checkpoint())

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

    async def finish(self) -> None:
        """Return when no checkpoint is under way."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        self._thread.shutdown()
        if self._fd is not None:
            os.close(self._fd)
