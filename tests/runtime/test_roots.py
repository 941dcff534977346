"""Folders that sessions leave behind."""

from __future__ import annotations

import os
from pathlib import Path

from agentcore_rl_toolkit.runtime import roots

DEPTH = 3_000  # beyond Python's recursion limit, and its path is longer than the kernel takes


def test_a_folder_of_any_depth_is_removed_also_by_the_next_runtime(tmp_path: Path) -> None:
    sessions = tmp_path / "state" / "sessions"
    (sessions / "one").mkdir(parents=True)
    folder = os.open(sessions / "one", os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    locked = roots.own_state(tmp_path / "state")
    assert not sessions.exists()
    locked.release()
