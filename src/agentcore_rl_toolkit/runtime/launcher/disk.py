"""Bounds the disk that sessions use together with all their files, by measuring: no file system here can be asked to.

Folders are measured every two seconds, and at once when the file system that holds them has lost a share of the limit: that is
one number, cheap to look at ten times a second.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

POLL_S = 2.0
LOOK_S = 0.1
LOST_SHARE = 1 / 8  # of the limit
REST = 5  # times as long as measuring took, at least: on a file system that others fill all the time, it must not be all we do


class Measured(Protocol):
    """What is measured: a session with a folder of its own."""

    directory: Path
    death: str | None

    def stop(self, grace_s: float) -> None: ...


def used_bytes(folder: Path) -> int:
    """Disk that the files below a folder take, links not followed. Files that come and go meanwhile are no error."""
    total = 0
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    total += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        folders.append(entry.path)
        except OSError:
            continue
    return total


def excess(used: int, limit: int) -> str:
    return f"the session was ended for its files: {used / 2**20:.0f} MiB, more than its limit ({limit / 2**20:g} MiB)"


async def hold_to(limit: int, sessions: Mapping[str, Measured]) -> None:
    """Run for ever: end the sessions whose folder has grown above the limit."""
    free: int | None = None
    took_s = 0.0
    while True:
        free = await _time_to_measure(limit, sessions, free, max(LOOK_S, REST * took_s))
        started_s = time.monotonic()
        for session in list(sessions.values()):
            used = await asyncio.to_thread(used_bytes, session.directory)
            if used > limit and session.death is None:
                session.death = excess(used, limit)
                session.stop(0.0)
        took_s = time.monotonic() - started_s


async def _time_to_measure(limit: int, sessions: Mapping[str, Measured], most: int | None, look_s: float) -> int | None:
    """Wait for it. ``most`` bytes were free when the folders were last measured; returns what is free now."""
    until_s = time.monotonic() + POLL_S
    while True:
        await asyncio.sleep(look_s)
        folder = next((session.directory.parent for session in sessions.values()), None)
        free = None if folder is None else await asyncio.to_thread(free_bytes, folder)
        lost = 0 if free is None or most is None else most - free
        if lost > limit * LOST_SHARE or time.monotonic() >= until_s:
            return free
        most = free if lost <= 0 else most


def free_bytes(folder: Path) -> int | None:
    """What the file system of a folder has left; None when it does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bfree * found.f_frsize
