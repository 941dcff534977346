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
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import ConfigError, GatewayError

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
_IOV = 512
_SEGMENT_NAME = re.compile(r"calls-(\d{8})\.log")

Report = Callable[[int, list[Callable[[OSError | None], None]], OSError | None], None]
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
        self._writer: _Writer | None = None
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
        self, kind: int, session_id: bytes, payload: bytes, done: Callable[[OSError | None], None] | None = None
    ) -> tuple[int, int]:
        """Queue one frame. Returns its position and length;

        `done` runs once it is with the operating system (or the disk: `fsync`).
        """
        head = _CHECKED.pack(kind, len(session_id)) + session_id
        crc = zlib.crc32(payload, zlib.crc32(head))
        length = _HEAD + len(head) + len(payload)
        if self._sizes[self._current] >= self.segment_bytes:
            self._flush()
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
        if not self._scheduled:
            if self._loop is None:
                self._flush()
            else:
                self._scheduled = True
                self._loop.call_soon(self._flush)
        return position, length

    def _flush(self) -> None:
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
            self._writer = _Writer(self._loop, self._report, fsync=True)
            self._writer.put(fd, buffers, callbacks)
            return
        started = time.monotonic()
        error = _write(fd, buffers)
        if time.monotonic() - started > _SLOW_WRITE_S and self._loop is not None:
            self.slow_writes += 1
            if self._writer is None:
                self._writer = _Writer(self._loop, self._report, fsync=False)
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

    def read(self, position: int, length: int) -> bytes:
        """The payload of one frame. Raises: GatewayError when the store is damaged there."""
        number, offset = position >> 40, position & (1 << 40) - 1
        if number == self._current:
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
        if self._pending:
            self._flush()
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


class _Writer:
    """A thread that writes batches in order. Batches queued while it writes go out together with the next sync."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Report, *, fsync: bool) -> None:
        self._loop = loop
        self._report = report
        self._broken: set[int] = set()  # descriptors whose later frames would lie in the wrong place
        self._fsync = fsync
        self._queue: deque[tuple[int, list[bytes], list[Callable[[OSError | None], None]]]] = deque()
        self._wake = threading.Condition()
        self._writing = False
        self._lent_until = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gateway-journal", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self._writing or time.monotonic() < self._lent_until

    @property
    def depth(self) -> int:
        return len(self._queue)

    def lend(self) -> None:
        """Take over for a second: the last write on the loop was slow."""
        self._lent_until = time.monotonic() + 1.0

    def put(self, fd: int, buffers: list[bytes], callbacks: list[Callable[[OSError | None], None]]) -> None:
        with self._wake:
            self._queue.append((fd, buffers, callbacks))
            self._wake.notify_all()

    def wait(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: not self._queue and not self._writing)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._writing = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                batch = list(self._queue)
                self._queue.clear()
                self._writing = True
            errors: dict[int, OSError | None] = {}
            for fd, buffers, _ in batch:
                if errors.get(fd) is None:
                    errors[fd] = OSError("an earlier append failed") if fd in self._broken else _write(fd, buffers)
            for fd, error in errors.items():
                if self._fsync and error is None:
                    try:
                        os.fsync(fd)
                    except OSError as e:
                        errors[fd] = e
                if errors[fd] is not None:
                    self._broken.add(fd)
            try:
                for fd, _, callbacks in batch:
                    self._loop.call_soon_threadsafe(self._report, fd, callbacks, errors[fd])
            except RuntimeError:  # the loop is gone: nobody waits for these any more
                return


def _write(fd: int, buffers: list[bytes]) -> OSError | None:
    """Write all buffers. Short writes go on where they stopped;

    a failed one is cut off so that the file ends with a whole frame.
    """
    start = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        for i in range(0, len(buffers), _IOV):
            group = buffers[i : i + _IOV]
            wanted = sum(map(len, group))
            written = os.writev(fd, group)
            if written < wanted:
                rest = memoryview(b"".join(group))[written:]
                while rest:
                    rest = rest[os.write(fd, rest) :]
    except OSError as e:
        log.error("appending to the gateway's store failed: %s", e)
        try:
            os.ftruncate(fd, start)
            os.lseek(fd, start, os.SEEK_SET)
        except OSError as again:
            log.error("cutting off the failed append failed as well: %s", again)
        return e
    return None


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
