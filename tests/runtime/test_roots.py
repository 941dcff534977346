"""Folders that sessions leave."""

from __future__ import annotations

import os
from pathlib import Path

from agentcore_rl_toolkit.runtime import roots
from agentcore_rl_toolkit.runtime.config import IsolationConfig, RuntimeConfig
from agentcore_rl_toolkit.runtime.runtime import Runtime
from agentcore_rl_toolkit.store.local import SessionFolder

DEPTH = 1_100  # beyond Python's recursion limit, and its path is longer than the kernel takes


def make_deep(path: Path) -> None:
    path.mkdir(parents=True)
    folder = os.open(path, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


def test_a_folder_of_any_depth_is_removed_also_by_the_next_runtime(tmp_path: Path) -> None:
    sessions = tmp_path / "state" / "sessions"
    make_deep(sessions / "one")
    locked = roots.own_state(tmp_path / "state")
    assert not sessions.exists()
    locked.release()


async def test_records_that_a_session_left_next_to_a_deep_folder_are_in_the_store_after_a_clean_end(
    tmp_path: Path,
) -> None:
    runtime = Runtime(RuntimeConfig(isolation=IsolationConfig(tier="none", store=tmp_path)))
    await runtime.start([])
    left = SessionFolder(tmp_path, f"{runtime.root.name}-1")
    make_deep(left.path / "work")
    (left.path / "record.json").write_text("{}")
    await runtime.close()
    assert os.listdir(tmp_path) == ["record.json"]
