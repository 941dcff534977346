"""Handing the journal's frames to the operating system: in one go, or by a thread while the disk is slow."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

_IOV = 512  # buffers per write: the kernel takes 1,024
Report = Callable[[int, list[Callable[[OSError | None], None]], OSError | None], None]


class Writer:
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
                    errors[fd] = OSError("an earlier append failed") if fd in self._broken else write_all(fd, buffers)
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


def write_all(fd: int, buffers: list[bytes]) -> OSError | None:
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
