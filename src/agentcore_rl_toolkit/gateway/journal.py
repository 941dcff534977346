"""Append-only store of a gateway: every call of every session, on disk, in order.

Frames lie end to end in numbered segment files::

    u32 length of what follows the checksum | u32 crc32 of it | u8 kind | u8 length of session id | session id | payload

Memory holds 16 bytes per frame (where it is), nothing of its content. An append is handed to the operating system in
one write per turn of the event loop, for all calls that finished in it (group commit), and only then does its
callback run, which lets the agent have the last byte of its reply: a killed gateway loses nothing that an agent saw
finished. With ``fsync``, or while the disk is slow, the same happens in a thread, so that the loop never waits for
the disk twice.

A write that the disk refuses is cut off again, and the next one takes its place in the file; whoever appended those
frames is told. While there are frames that must come before any other (``owing``), nothing else is written.

At start the segments are read back. A torn last frame (the process died in a write) is cut off, damage elsewhere is
passed over and told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import struct
import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

from ..errors import GatewayError
from .journal_scan import DAMAGED, HEAD, frames, payload_of
from .journal_writer import Batch, Done, Writer, lock, write_all

log = logging.getLogger(__name__)

CALL = 1
OPENED = 2  # payload: the session's settings
CLOSED = 3
DELETED = 4
GAPS = 5  # payload: where among the session's calls, counted from 0, the disk refused some, and how many

_CHECKED = struct.Struct("<BB")
_RETRY_S = 0.1  # how often a disk that refuses is tried again
SEGMENT_BYTES = 256 * 2**20
_SLOW_WRITE_S = 0.02  # an append to the page cache takes microseconds; this is a disk that pushes back
_SEGMENT_NAME = re.compile(r"calls-(\d{8})\.log")

Replay = Callable[[int, str, bytes, int, int], None]
Lost = Callable[[int, bytes, bytes, int], None]  # kind, session id, payload, position


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
        self.damaged_bytes = 0
        self.on_lost: Lost | None = None  # told of every frame that the disk refused
        self.repay: Callable[[], None] | None = None  # appends what is owed
        self.owing = False  # something must be written before anything else
        self.own_from = 0  # the position from which on frames are this process's
        self.failed: OSError | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock(directory)
        self._files: dict[int, int] = {}  # segment number -> descriptor
        self._sizes: dict[int, int] = {}
        self._live: dict[int, int] = {}  # frames of sessions that are not deleted
        self._tombs: dict[int, int] = {}  # deletions noted in the segment
        self._born: dict[int, float] = {}
        self._damaged: set[int] = set()  # where damage was found since the start
        self._suspect: set[int] = set()  # segments where it was found at the start: a session may lack a call
        self._current = 0
        self._stuck = False  # no further segment could be begun, and that is logged
        self._pending: list[bytes] = []
        self._callbacks: list[Done] = []
        self._offset = 0  # where in the current segment the pending frames begin
        self._retry_at = 0.0
        self._refused = (0, 0)  # from where to where in the current segment batches were refused
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
            for kind, session_id, payload, start, length in frames(path, last=number == numbers[-1]):
                position = number << 40 | start
                if kind == DAMAGED:
                    self.damaged_bytes += length
                    self._suspect.add(number)
                    log.error("%s: passing over %d damaged bytes at byte %d", path.name, length, start)
                count += kind != DAMAGED
                self._count(number, kind)
                replay(kind, session_id, payload, position, length)
                end = start + length
            size = os.fstat(fd).st_size
            if end < size:
                self.torn_bytes += size - end
                log.warning("%s: cutting off the %d bytes after the last whole frame", path.name, size - end)
                os.ftruncate(fd, end)
            self._sizes[number] = end
        self._current = numbers[-1] if numbers else 0
        if not numbers or self._sizes[self._current] >= self.segment_bytes:
            self._next_segment()
        self._offset = self._sizes[self._current]
        self.own_from = self._current << 40 | self._offset
        return count

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def _path(self, number: int) -> Path:
        return self.directory / f"calls-{number:08d}.log"

    def _next_segment(self) -> None:
        """Begin a segment. Raises: OSError."""
        number = self._current + 1
        fd = os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if self._current:  # what counts is the age of the latest in it
            self._born[self._current] = os.fstat(self._files[self._current]).st_mtime
        self._current, self._stuck = number, False
        self._files[number] = fd
        self._sizes[number] = self._offset = 0
        self._refused = (0, 0)
        self._live[number] = self._tombs[number] = 0
        self._born[number] = time.time()

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
        done: Done | None = None,
        *,
        alone: bool = False,
    ) -> tuple[int, int]:
        """Queue one frame. Returns its position and length;

        `done` runs once it is with the operating system (or the disk: `fsync`). With ``alone`` no others are to be
        expected in this turn of the loop, and the caller calls `commit` itself.
        """
        head = _CHECKED.pack(kind, len(session_id)) + session_id
        crc = zlib.crc32(payload, zlib.crc32(head))
        length = HEAD + len(head) + len(payload)
        if self.owing:
            self._repay()
        if self._sizes[self._current] >= self.segment_bytes:
            self._roll()
        number = self._current
        position = number << 40 | self._sizes[number]
        self._sizes[number] += length
        self._count(number, kind)
        self._pending.append(struct.pack("<II", length - HEAD, crc) + head)
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
        number = self._current
        batch: Batch = (self._files[number], self._offset, self._pending, self._callbacks)
        self._offset = self._sizes[number]
        self._pending, self._callbacks = [], []
        if self.owing:
            self._report(number, batch, self.failed or OSError("an earlier append failed"))
            return
        if self._writer is not None and (self.fsync or self._writer.busy):
            self._writer.put(number, batch)
            return
        if self.fsync and self._loop is not None:
            self._writer = Writer(self._loop, self._report, fsync=True)
            self._writer.put(number, batch)
            return
        started = time.monotonic()
        error = write_all(*batch[:3])
        if time.monotonic() - started > _SLOW_WRITE_S and self._loop is not None:
            self.slow_writes += 1
            if self._writer is None:
                self._writer = Writer(self._loop, self._report, fsync=False)
            self._writer.lend()
        self._report(number, batch, error)

    def _roll(self) -> None:
        self.commit()
        try:
            if not self.owing:
                self._next_segment()
        except OSError as e:  # better one segment that is too large than none
            if not self._stuck:
                log.error("no further segment of the gateway's store can be opened: %s", e)
            self._stuck = True

    def _report(self, number: int, batch: Batch, error: OSError | None) -> None:
        if error is not None:
            self._lose(number, batch, error)
        elif self.failed is not None:
            log.warning("the gateway's store takes calls again")
            self.failed = None
        for callback in batch[3]:
            callback(error)

    def _lose(self, number: int, batch: Batch, error: OSError) -> None:
        """The frames of a batch are not stored: take back their places and tell."""
        if error is not self.failed:  # not one that was refused without another try
            self._retry_at = time.monotonic() + _RETRY_S
            self.failed = error
        _, offset, buffers, _ = batch
        end = offset + sum(map(len, buffers))
        if number == self._current:
            self._refused = (self._refused[0] if offset == self._refused[1] else offset, end)
            if end == self._sizes[number]:  # nothing lies behind them; otherwise they leave a hole
                self._sizes[number] = self._offset = self._refused[0]
                self._refused = (0, 0)
        position = number << 40 | offset
        for head, payload in zip(buffers[::2], buffers[1::2], strict=True):
            kind, name = head[HEAD], head[HEAD + 2 :]
            if kind == DELETED and number in self._tombs:
                self._tombs[number] -= 1
            elif kind != DELETED:
                self.forget_one(position)
            if self.on_lost is not None:
                self.on_lost(kind, name, payload, position)
            position += len(head) + len(payload)

    def _repay(self) -> None:
        """Append what is owed in front of what comes, unless the disk refused a moment ago."""
        if self.repay is not None and time.monotonic() >= self._retry_at:
            self.owing = False
            self.repay()

    def tend(self) -> None:
        """Try a disk that refused again, though nobody appends."""
        if self.failed is None:
            return
        if self.owing:
            self._repay()
        elif not self._pending and time.monotonic() >= self._retry_at:
            self.forget_one(self.append(GAPS, b"", b"")[0])  # says nothing: it only tries

    async def kept(self) -> None:
        """Return when what was appended so far is with the operating system, or was refused."""
        if self._pending:
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._callbacks.append(lambda _: None if told.done() else told.set_result(None))
            await told
        elif self._writer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.wait)

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
        if len(data) < length:
            raise GatewayError(f"{self._path(number).name} ends before byte {offset + length}")
        payload = payload_of(data)
        if payload is None:
            if position not in self._damaged:
                self._damaged.add(position)
                self.damaged_bytes += length
            raise GatewayError(f"{self._path(number).name} is damaged at byte {offset}")
        return payload

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
        for number in sorted(self._live.keys() - self._suspect):
            # A note of deletion must outlive the frames it deletes, which lie in older segments.
            needed = self._live[number] > 0 or (self._tombs[number] and number != min(self._files))
            if number != self._current and not needed:
                freed += self.drop(number)
        return freed

    def trust(self, since_s: float) -> None:
        """No session is older (unix seconds): none lacks what lay in a damaged segment that was last written before."""
        self._suspect = {number for number in self._suspect & self._files.keys() if self._born[number] >= since_s}

    def drop(self, number: int) -> int:
        """Remove a segment. Returns the bytes given back."""
        self.settle()  # the thread may not be done with it
        os.close(self._files.pop(number))
        self._path(number).unlink(missing_ok=True)
        self._live.pop(number)
        self._tombs.pop(number)
        self._born.pop(number)
        return self._sizes.pop(number)

    def begin_anew(self, older_than_s: float) -> None:
        """Write on in another segment when this one was begun so long ago: the one that is written cannot be dropped."""
        if self._sizes[self._current] and time.time() - self._born[self._current] > older_than_s:
            self._roll()

    def oldest(self) -> tuple[int, float] | None:
        """Number of the oldest segment that is not being written, and when it was last (unix seconds)."""
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
