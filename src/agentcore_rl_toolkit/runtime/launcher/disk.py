"""Bounds the disk that sessions use together with all their files, by measuring: no file system here can be asked to."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

POLL_S = 2.0


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
    while True:
        await asyncio.sleep(POLL_S)
        for session in list(sessions.values()):
            used = await asyncio.to_thread(used_bytes, session.directory)
            if used > limit and session.death is None:
                session.death = excess(used, limit)
                session.stop(0.0)
