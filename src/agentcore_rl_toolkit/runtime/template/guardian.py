"""A process between the runtime and a template, so that nothing is left of either when both are killed at once.

The kernel ends a template's sessions with it, but not what those have started: orphans go to the nearest process above that
adopts them. That is this one, which does nothing else. Where sessions are in pid namespaces it is not needed: they end whole.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from ..launcher import linux

GRACE_S = 30  # for a template to end its sessions and remove their folders when the runtime is gone
END_S = 20.0


def stay_behind() -> None:
    """Return in a child; this process stays above it, and ends everything below when the child has ended."""
    above, own = os.getppid(), os.getpid()
    linux.adopt_orphans()
    child = os.fork()
    if child == 0:
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != own:
            os._exit(1)
        return
    try:
        _watch(child, above)
    finally:
        os._exit(1)


def _watch(child: int, above: int) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))

    def runtime_is_gone(number: int, frame: Any) -> None:
        _signal(child, signal.SIGHUP)  # which ends one that is loading its agent; one that serves has seen it by itself
        signal.alarm(GRACE_S)

    signal.signal(signal.SIGHUP, runtime_is_gone)
    signal.signal(signal.SIGALRM, lambda number, frame: _signal(child, signal.SIGKILL))
    linux.die_with_parent(signal.SIGHUP)
    if os.getppid() != above:
        runtime_is_gone(signal.SIGHUP, None)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    end_children(END_S)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def end_children(within_s: float) -> None:
    """Kill every child of this process, and those that become its children by that, until there are none."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for stray in linux.children():
            _signal(stray, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
