"""Append-only store of a gateway: every call of every session, on disk, in order.

Frames lie end to end in numbered segment files::

    u32 length of what follows the checksum | u32 crc32 of it | u8 kind | u8 length of session id | session id | payload

Memory holds 16 bytes per frame (where it is), nothing of its content. An append is handed to the operating system in
one write per turn of the event loop, for all calls that finished in it (group commit), and only then does its
callback run, which lets the agent have the last byte of its reply: a killed gateway loses nothing that an agent saw
finished. With ``fsync``, or while the disk is slow, the same happens in a thread, so that the loop never waits for
the disk twice.

At start the segments are read back; a torn last frame (the process died in a write) is cut off.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import ConfigError, GatewayError
from .journal_writer import Writer, write_all

log = logging.getLogger(__name__)

CALL = 1
OPENED = 2  # payload: the session's settings
CLOSED = 3
DELETED = 4

_FRAME = struct.Struct("<IIBB")
_CHECKED = struct.Struct("<BB")
_HEAD = 8  # bytes before what the length counts
SEGMENT_BYTES = 256 * 2**20
_SLOW_WRITE_S = 0.02  # an append to the page cache takes microseconds; this is a disk that pushes back
_SEGMENT_NAME = re.compile(r"calls-(\d{8})\.log")

Replay = Callable[[int, str, bytes, int, int], None]


class Journal:
    """Appends frames, reads them back, deletes by session. Belongs to one event loop; one process per directory.

    Raises: ConfigError when another process has the directory open.
    """

    def __init__(self, directory: Path, *, fsync: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self.fsync = fsync
        self.segment_bytes = segment_bytes
        self.appended_frames = 0
        self.appended_bytes = 0
        self.slow_writes = 0
        self.torn_bytes = 0
        self.failed: OSError | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory)
        self._files: dict[int, int] = {}  # segment number -> descriptor
        self._sizes: dict[int, int] = {}
        self._live: dict[int, int] = {}  # frames of sessions that are not deleted
        self._tombs: dict[int, int] = {}  # deletions noted in the segment
        self._born: dict[int, float] = {}
        self._current = 0
        self._pending: list[bytes] = []
        self._callbacks: list[Callable[[OSError | None], None]] = []
        self._scheduled = False
        self._writer: Writer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- starting

    def recover(self, replay: Replay) -> int:
        """Read every stored frame in order, telling `replay(kind, session_id, payload, position, length)`.

        Returns their number.
        """
        count = 0
        numbers = sorted(int(m[1]) for m in map(_SEGMENT_NAME.fullmatch, os.listdir(self.directory)) if m)
        for number in numbers:
            path = self._path(number)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._files[number], self._live[number], self._tombs[number] = fd, 0, 0
            self._born[number] = path.stat().st_mtime
            end = 0
            for kind, session_id, payload, start, length in _scan(path):
                position = number << 40 | start
                self._count(number, kind)
                replay(kind, session_id, payload, position, length)
                end = start + length
                count += 1
            size = os.fstat(fd).st_size
            if end < size:
                # Only the last write of a killed process can be torn; a hole in an older segment is damage worth a
                # loud word.
                (log.warning if number == numbers[-1] else log.error)(
                    "%s: dropping %d bytes after the last whole frame", path.name, size - end
                )
                self.torn_bytes += size - end
                os.ftruncate(fd, end)
            self._sizes[number] = end
        self._current = numbers[-1] if numbers else 0
        if not numbers or self._sizes[self._current] >= self.segment_bytes:
            self._next_segment()
        os.lseek(self._files[self._current], 0, os.SEEK_END)
        return count

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def _path(self, number: int) -> Path:
        return self.directory / f"calls-{number:08d}.log"

    def _next_segment(self) -> None:
        self._current += 1
        fd = os.open(self._path(self._current), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._files[self._current] = fd
        self._sizes[self._current] = 0
        self._live[self._current] = self._tombs[self._current] = 0
        self._born[self._current] = time.time()

    def _count(self, number: int, kind: int) -> None:
        if kind == DELETED:
            self._tombs[number] += 1
        else:
            self._live[number] += 1

    # -- writing

    def append(
        self,
        kind: int,
        session_id: bytes,
        payload: bytes,
        done: Callable[[OSError | None], None] | None = None,
        *,
        alone: bool = False,
    ) -> tuple[int, int]:
        """Queue one frame. Returns its position and length;

        `done` runs once it is with the operating system (or the disk: `fsync`). With ``alone`` no others are to be
        expected in this turn of the loop, and the caller calls `commit` itself.
        """
        head = _CHECKED.pack(kind, len(session_id)) + session_id
        crc = zlib.crc32(payload, zlib.crc32(head))
        length = _HEAD + len(head) + len(payload)
        if self._sizes[self._current] >= self.segment_bytes:
            self.commit()
            self._next_segment()
        number = self._current
        position = number << 40 | self._sizes[number]
        self._sizes[number] += length
        self._count(number, kind)
        self._pending.append(struct.pack("<II", length - _HEAD, crc) + head)
        self._pending.append(payload)
        if done is not None:
            self._callbacks.append(done)
        self.appended_frames += 1
        self.appended_bytes += length
        if not self._scheduled and not alone:
            if self._loop is None:
                self.commit()
            else:
                self._scheduled = True
                self._loop.call_soon(self.commit)
        return position, length

    def commit(self) -> None:
        """Hand what is queued to the operating system."""
        self._scheduled = False
        if not self._pending:
            return
        buffers, callbacks = self._pending, self._callbacks
        self._pending, self._callbacks = [], []
        fd = self._files[self._current]
        if self._writer is not None and (self.fsync or self._writer.busy):
            self._writer.put(fd, buffers, callbacks)
            return
        if self.fsync and self._loop is not None:
            self._writer = Writer(self._loop, self._report, fsync=True)
            self._writer.put(fd, buffers, callbacks)
            return
        started = time.monotonic()
        error = write_all(fd, buffers)
        if time.monotonic() - started > _SLOW_WRITE_S and self._loop is not None:
            self.slow_writes += 1
            if self._writer is None:
                self._writer = Writer(self._loop, self._report, fsync=False)
            self._writer.lend()
        self._report(fd, callbacks, error)

    def _report(self, fd: int, callbacks: list[Callable[[OSError | None], None]], error: OSError | None) -> None:
        if error is not None:
            self.failed = error
            if fd == self._files.get(self._current):
                self._next_segment()  # positions handed out for the failed one no longer hold
        elif callbacks:
            self.failed = None
        for callback in callbacks:
            callback(error)

    # -- reading

    def read(self, position: int, length: int, *, settled: bool = False) -> bytes:
        """The payload of one frame. ``settled``: it is known to be written, which makes this fit for any thread.

        Raises: GatewayError when the store is damaged there.
        """
        number, offset = position >> 40, position & (1 << 40) - 1
        if number == self._current and not settled:
            self.settle()
        try:
            data = os.pread(self._files[number], length, offset)
        except (OSError, KeyError) as e:
            raise GatewayError(f"{self._path(number).name} cannot be read: {e}") from e
        if len(data) < _HEAD + 2:
            raise GatewayError(f"{self._path(number).name} ends before byte {offset + length}")
        size, crc, _, id_length = _FRAME.unpack_from(data)
        body = memoryview(data)[_HEAD:]
        if size != len(body) or zlib.crc32(body) != crc:
            raise GatewayError(f"{self._path(number).name} is damaged at byte {offset}")
        return data[_HEAD + 2 + id_length :]

    def settle(self) -> None:
        """Return when everything appended so far is with the operating system."""
        self.flush()
        self.wait()

    def flush(self) -> None:
        """Hand everything appended so far on, to the operating system or to the thread that writes."""
        if self._pending:
            self.commit()

    def wait(self) -> None:
        """Return when the thread that writes has written what it was given. Fit for any thread."""
        if self._writer is not None:
            self._writer.wait()

    # -- retention

    def forget(self, positions: array[int]) -> None:
        """Count the frames of a deleted session as dead; segments without living frames are removed from disk."""
        for position in positions:
            self.forget_one(position)
        self.collect()

    def forget_one(self, position: int) -> None:
        number = position >> 40
        if number in self._live:
            self._live[number] -= 1

    def collect(self) -> int:
        """Remove whole segments that hold nothing of a living session. Returns the bytes given back."""
        freed = 0
        for number in sorted(self._live):
            # A note of deletion must outlive the frames it deletes, which lie in older segments.
            needed = self._live[number] > 0 or (self._tombs[number] and number != min(self._files))
            if number != self._current and not needed:
                freed += self.drop(number)
        return freed

    def drop(self, number: int) -> int:
        fd = self._files.pop(number)
        os.close(fd)
        self._path(number).unlink(missing_ok=True)
        self._live.pop(number)
        self._tombs.pop(number)
        self._born.pop(number)
        return self._sizes.pop(number)

    def oldest(self) -> tuple[int, float] | None:
        """Number and age limit stamp (unix seconds) of the oldest segment that is not being written."""
        numbers = [n for n in self._files if n != self._current]
        return (min(numbers), self._born[min(numbers)]) if numbers else None

    @property
    def segments(self) -> frozenset[int]:
        return frozenset(self._files)

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def queue_depth(self) -> int:
        return len(self._pending) + (self._writer.depth if self._writer is not None else 0)

    def close(self) -> None:
        self.settle()
        if self._writer is not None:
            self._writer.stop()
        for fd in self._files.values():
            os.fsync(fd)
            os.close(fd)
        self._files.clear()
        os.close(self._lock)


def _scan(path: Path) -> Iterator[tuple[int, str, bytes, int, int]]:
    """Whole frames of one segment: kind, session id, payload, start, length. Stops at the first that is not whole."""
    with path.open("rb", buffering=2**20) as file:
        start = 0
        while True:
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                return
            size, crc, kind, id_length = _FRAME.unpack(head)
            if size < 2 + id_length:
                return
            rest = file.read(size - 2)
            if len(rest) < size - 2 or zlib.crc32(rest, zlib.crc32(head[_HEAD:])) != crc:
                return
            length = _HEAD + size
            yield kind, rest[:id_length].decode("utf-8", "replace"), rest[id_length:], start, length
            start += length


def _lock(directory: Path) -> int:
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        raise ConfigError(f"{directory} is in use by another gateway; give each its own --store") from e
    return fd
