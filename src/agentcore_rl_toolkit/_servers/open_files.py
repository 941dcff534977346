"""The limit of open files of a server: every connection is one."""

from __future__ import annotations

import contextlib
import resource

MAX_OPEN_FILES = 65_536


def raise_file_limit() -> None:
    """Lift the soft limit to the hard one: the usual 1,024 ends at a few hundred agents."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # macOS may refuse what it reports as its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
