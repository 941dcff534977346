"""What a session that exceeds a limit is told: memory and disk, per tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import botocore.exceptions
import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime.isolation import cgroups
from agentcore_rl_toolkit.runtime.launcher.disk import used_bytes
from agentcore_rl_toolkit.runtime.remote import table

from .conftest import AGENTS, Server, wait_for

AGENT = AGENTS / "greedy.py"


def refused(server: Server, payload: dict[str, object], session_id: str) -> str:
    """The caller's error."""
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        server.invoke(payload, session_id)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424
    return str(caught.value)


@pytest.mark.parametrize("tier", ["namespaces", "landlock", "process"])
def test_a_session_above_a_limit_is_ended_and_says_which(start_server: Callable[..., Server], tier: str) -> None:
    server = start_server("--isolation", tier, "--memory-mb", "150", "--disk-mb", "20", agent=AGENT)
    where = cgroups.detect()
    if where is not None and "memory" in where.controllers:
        session_id = new_session_id()
        assert "memory limit (150 MiB)" in refused(server, {"memory_mb": 400}, session_id)
        ended = wait_for(lambda: server.ended(session_id))
        assert (ended["state"], ended["exit_status"]) == ("crashed", -9)
        assert "memory limit (150 MiB)" in table(server.view.sessions(ended=True))
    session_id, modest = new_session_id(), new_session_id()
    server.invoke({"files": 3, "file_mb": 5}, modest)
    assert "more than its limit (20 MiB)" in refused(server, {"files": 6, "file_mb": 5, "s": 20}, session_id)
    ended = wait_for(lambda: server.ended(session_id))
    assert ended["state"] == "crashed"
    folders = Path(ended["log"]).parents[2] / "sessions"
    wait_for(lambda: not list(folders.glob(f"*{session_id[:32]}*")))
    assert "OSError" in server.invoke({"files": 1, "file_mb": 25}, modest)["error"]  # one file is held at once


def test_disk_is_counted_as_it_is_used_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    (folder / "deep" / "er").mkdir(parents=True)
    empty = used_bytes(folder)
    (tmp_path / "large").write_bytes(b"x" * 10**6)
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "loop").symlink_to(folder)
    with (folder / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert used_bytes(folder) - empty < 10**5
    (folder / "deep" / "er" / "file").write_bytes(b"x" * 10**6)
    assert 10**6 <= used_bytes(folder) - empty < 1.2 * 10**6
    assert used_bytes(tmp_path / "absent") == 0
