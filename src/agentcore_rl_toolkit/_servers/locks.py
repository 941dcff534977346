"""Locks of files. A forked child shares the locks of its parent, and would hold them after the end of its parent."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(holder: Any) -> None:
    """Call ``close`` of the holder of a lock, such as a file, in each child that this process forks."""
    _holders.add(holder)


def _close_all() -> None:
    for holder in list(_holders):
        with contextlib.suppress(OSError):  # the parent was closing it
            holder.close()


os.register_at_fork(after_in_child=_close_all)
