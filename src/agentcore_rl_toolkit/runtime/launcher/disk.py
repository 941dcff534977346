"""Bounds the disk that a session uses with all its files together, by measuring: no file system here can be asked to.

Measured are a session's folder, its log, and the files that its processes hold open without a name, or have mapped. That happens
every two seconds, and at once when the file system that holds them has lost a share of the limit: that is one number, cheap to
look at ten times a second. Logs are kept to a size of their own, with or without a limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from .session_log import LOG_BYTES, log_bytes, shorten
from .trees import measure
from .unnamed import unnamed_bytes

log = logging.getLogger(__name__)

POLL_S = 2.0
LOOK_S = 0.1
LOST_SHARE = 1 / 8  # of the limit
REST = 5  # times as long as measuring took, at least: on a file system that others fill all the time, it must not be all we do
MISSED_IN_A_ROW = 5


class Measured(Protocol):
    """What is measured: a session with a folder and a log of its own."""

    directory: Path
    log_path: Path
    pid: int | None
    death: str | None

    def stop(self, grace_s: float) -> None: ...


def used_bytes(folder: Path, *, most: int | None = None) -> int:
    """Disk that the files below a folder take, links not followed; above ``most`` it stops counting."""
    return measure(folder, most=most).bytes


def excess(used: int, limit: int) -> str:
    return f"the session was ended for its files: {used / 2**20:.0f} MiB, more than its limit ({limit / 2**20:g} MiB)"


def log_limit(limit: int | None) -> int:
    """The size that a session's log is kept to: a log alone is no reason to end a session."""
    return LOG_BYTES if limit is None else min(LOG_BYTES, limit // 4)


async def hold_to(
    limit: int | None,
    sessions: Mapping[str, Measured],
    *,
    top: Callable[[], int | None] = lambda: None,
    log_path: Path | None = None,
) -> None:
    """Run for ever: shorten the sessions' logs, and ``log_path``; end the sessions whose files take more than the limit.

    ``top`` names the process that those of all sessions descend from.
    """
    free: int | None = None
    took_s = 0.0
    missed: dict[str, int] = {}
    failures = 0
    while True:
        if limit is None:
            await asyncio.sleep(POLL_S)
        else:
            free = await _time_to_measure(limit, sessions, free, max(LOOK_S, REST * took_s))
        started_s = time.monotonic()
        try:
            await _shorten_logs(log_limit(limit), sessions, log_path)
            if limit is not None and sessions:
                missed = await _measure(limit, sessions, top(), missed)
            failures = 0
        except Exception:  # the next round may go well, and without it no session would have a limit any more
            failures += 1
            if failures in (1, 10, 100):
                log.exception("what sessions use of the disk could not be measured (%d times in a row)", failures)
        took_s = time.monotonic() - started_s


async def _shorten_logs(most: int, sessions: Mapping[str, Measured], log_path: Path | None) -> None:
    for path in [s.log_path for s in sessions.values()] + ([] if log_path is None else [log_path]):
        if log_bytes(path) > most:
            try:
                await asyncio.to_thread(shorten, path, most)
            except OSError as e:  # a full disk, for instance
                log.warning("the log %s could not be cut: %s", path, e)


async def _measure(
    limit: int, sessions: Mapping[str, Measured], top: int | None, missed: Mapping[str, int]
) -> dict[str, int]:
    """End what is above the limit. Returns: how many times in a row folders of a session could not be looked into."""
    again: dict[str, int] = {}
    unnamed = {} if top is None else await asyncio.to_thread(_unnamed, dict(sessions), top)
    for name, session in list(sessions.items()):
        found = await asyncio.to_thread(measure, session.directory, most=limit)
        used = found.bytes + unnamed.get(name, 0) + log_bytes(session.log_path)
        if found.missed:
            again[name] = missed.get(name, 0) + 1
        if session.death is None and used > limit:
            session.death = excess(used, limit)
            session.stop(0.0)
        elif session.death is None and again.get(name, 0) >= MISSED_IN_A_ROW:
            session.death = "the session was ended for its files: it keeps them from being measured"
            session.stop(0.0)
    return again


def _unnamed(sessions: Mapping[str, Measured], top: int) -> dict[str, int]:
    devices = set()
    for session in sessions.values():
        for path in (session.directory, session.log_path):
            try:
                devices.add(os.lstat(path).st_dev)
            except OSError:
                continue
    return unnamed_bytes(top, {name: (s.pid, str(s.directory)) for name, s in sessions.items()}, devices)


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
