"""Processes held to a share of a core each, by the kernel's CPU quotas.

On a machine with few cores a second gateway gets only what load and inference server leave of them, so two
gateways in a race without rules tell how many cores there are. Held to the same share each, with load and server free,
they tell what the second one adds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PERIOD_US = 10_000


def _hierarchy() -> tuple[Path, bool] | None:
    """Where groups with CPU quotas can be made, and whether it is of the kernel's second version."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, place, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(place), False
        if kind == "cgroup2" and "cpu" in (Path(place) / "cgroup.controllers").read_text().split():
            return Path(place), True
    return None


@contextmanager
def _held(root: Path, second: bool, pid: int, share: float) -> Iterator[None]:
    group = root / f"benchmark-{os.getpid()}-{pid}"
    quota = int(share * PERIOD_US)
    if second:
        (root / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    try:
        if second:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(member)
        group.rmdir()


@contextmanager
def held(pids: Sequence[int], share: float) -> Iterator[bool]:
    """Each of the processes gets at most so much of a core, 0 to 1. Yields False where this machine does not let us."""
    found = _hierarchy()
    with ExitStack() as stack:
        try:
            if found is not None:
                for pid in pids:
                    stack.enter_context(_held(*found, pid, share))
        except OSError:  # not root, or the groups are somebody else's
            stack.close()
            found = None
        yield found is not None
