"""What a session's process uses: memory and CPU, as the system tells."""

from __future__ import annotations

import os
from pathlib import Path

from ..._servers import procfs


def usage(pid: int) -> tuple[int | None, float | None]:
    """Private memory in bytes and CPU seconds of a process of this machine; None where the system does not tell."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) * 1024
    except (OSError, IndexError):
        return None, None
    fields = procfs.stat(pid)
    if fields is None:
        return None, None
    ticks = int(fields[procfs.USER_TICKS]) + int(fields[procfs.SYSTEM_TICKS])
    return private, ticks / os.sysconf("SC_CLK_TCK")
