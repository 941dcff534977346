"""The end of a process that used obstore: its threads are through with Python before Python is taken down.

A call's result is handed over by a thread of obstore's own, which needs the interpreter a moment longer than the caller
that is woken by it. A program that ends right then may take the interpreter down under that thread, and the process
aborts (SIGABRT), its work done. Source: PyO3/pyo3-async-runtimes, issue 40.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time

LOOK_S = 0.008  # a thread that waits for the interpreter moves every 5 ms
LONGEST_S = 1.0


@functools.cache
def watch() -> None:
    """Have the end of this process wait, shortly, for threads that are not Python's. A second call changes nothing."""
    atexit.register(settle)


def settle(longest_s: float = LONGEST_S) -> bool:
    """Return when no thread but Python's own has moved for `LOOK_S`; False when some still do after `longest_s`.

    Where the system does not tell what threads do, this waits a few looks long.
    """
    give_up_s = time.monotonic() + longest_s
    before = _moves()
    while True:
        time.sleep(LOOK_S)  # lets go of the interpreter: who waits for it gets it
        now = _moves()
        if now is None:
            time.sleep(3 * LOOK_S)
            return True
        if now == before and all(at_rest for at_rest, _ in now.values()):
            return True
        if time.monotonic() > give_up_s:
            return False
        before = now


def _moves() -> dict[str, tuple[bool, bytes]] | None:
    """For each thread that Python does not know: whether it sleeps, and how often it was put to sleep or off its core."""
    known = {str(thread.native_id) for thread in threading.enumerate()}
    found = {}
    try:
        for name in os.listdir("/proc/self/task"):
            if name not in known:
                with open(f"/proc/self/task/{name}/status", "rb") as file:
                    lines = file.read().splitlines()
                sleeps = any(line.startswith(b"State:\tS") for line in lines)
                found[name] = sleeps, b" ".join(line for line in lines if b"ctxt_switches" in line)
    except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile, or no Linux
        return None if not os.path.isdir("/proc/self/task") else {"": (False, b"")}
    return found
