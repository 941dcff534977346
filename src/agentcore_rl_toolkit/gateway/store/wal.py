"""The write-ahead log of a store: a thread moves it into the file (a checkpoint).

A commit that meets the end of a checkpoint finds the file locked, and is tried again a moment later (`store.writer`).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

from .schema import connect, trouble

log = logging.getLogger(__name__)

WAL_BYTES = 32 * 2**20  # a write-ahead log longer than this is moved into the file


class WriteAheadLog:
    """The log of a store's file. ``path`` None: the store is a private file, which has none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.longest_bytes = WAL_BYTES
        self.checkpoints = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        try:
            return 0 if self._path is None else self._path.with_name(self._path.name + "-wal").stat().st_size
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
            self.checkpoints += 1
        except sqlite3.Error as e:
            log.error("moving the write-ahead log into the store failed: %s", trouble(e, self._path))

    def _move(self) -> None:
        with closing(connect(self._path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most of it, beside commits
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    async def finish(self) -> None:
        """Return when no checkpoint is under way."""
        if self._task is not None:
            await self._task
