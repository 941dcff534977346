"""How sessions live and end."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import ReadTimeoutError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server, alive, wait_for, write_agent


def test_idle_session_ends_and_its_folder_goes(
    start_server: Callable[..., Server], session_id: str, tmp_path: Path
) -> None:
    server = start_server("--set", "idle_timeout=1", "--state-dir", str(tmp_path / "state"), agent=AGENTS / "bare.py")
    server.invoke({}, session_id)
    pid = server.session(session_id)["pid"]
    ended = wait_for(lambda: server.ended(session_id))
    assert ended["state"] == "idle"
    assert 0.9 < ended["idle_s"] < 30
    assert not alive(pid)
    wait_for(lambda: not list((tmp_path / "state" / "sessions").glob("*/*")))
    assert server.invoke({}, session_id)["calls"] == 1


def test_stop_gives_sigterm_and_a_grace_and_frees_the_id_at_once(
    start_server: Callable[..., Server], session_id: str, tmp_path: Path
) -> None:
    note = tmp_path / "notes"
    note.mkdir()
    agent = write_agent(
        tmp_path / "agent" / "agent.py",
        f"""
import atexit
atexit.register(lambda: open({str(note / "log")!r}, "a").write("exit function ran"))
""",
    )
    server = start_server("--writable", str(note), "--set", "stop_grace=20", agent=agent)
    server.invoke({}, session_id)
    pid = server.session(session_id)["pid"]
    server.default_client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    assert server.session(session_id) is None
    server.invoke({}, session_id)
    assert server.session(session_id)["pid"] != pid
    assert wait_for(lambda: server.ended(session_id))["exit_status"] == 0
    assert (note / "log").read_text() == "exit function ran"


def test_session_that_ignores_sigterm_is_killed_with_all_it_started(
    start_server: Callable[..., Server], session_id: str
) -> None:
    server = start_server("--set", "stop_grace=0.5", agent=AGENTS / "bare.py")
    daemon = server.invoke({"do": "spawn"}, session_id)["child"]
    assert daemon in server.processes()
    client = server.client(read_timeout=0.5)
    with pytest.raises(ReadTimeoutError):
        server.invoke({"do": "spin", "s": 30}, session_id, client=client)  # its loop is blocked: SIGTERM has no effect
    server.default_client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    assert wait_for(lambda: server.ended(session_id))["exit_status"] == -9
    wait_for(lambda: server.processes() == [server.template_pid()])
    assert not alive(daemon)


@pytest.mark.system
def test_a_burst_of_new_sessions_loses_none_and_leaves_nothing(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """More at once than could start within the init timeout if all did: they queue, and the timeout counts from their turn."""
    server = start_server("--set", "init_timeout=5", "--state-dir", str(tmp_path / "state"))
    client = server.client(max_pool_connections=100)
    ids = [new_session_id() for _ in range(80)]

    def rollout(session_id: str) -> int:
        calls: int = server.invoke({}, session_id, client=client)["calls"]
        client.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
        return calls

    with concurrent.futures.ThreadPoolExecutor(80) as pool:
        assert list(pool.map(rollout, ids)) == [1] * 80
    wait_for(lambda: len(server.processes()) == 1)
    wait_for(lambda: not list((tmp_path / "state" / "sessions").glob("*/*")))
    assert server.view.get("/_local/status")["ended"] == {"stopped": 80}


def test_sessions_share_no_files_environment_or_random_numbers(server: Server) -> None:
    a, b = new_session_id(), new_session_id()
    first, second = server.invoke({"do": "where"}, a), server.invoke({"do": "where"}, b)
    assert first["cwd"] != second["cwd"]
    assert first["tmp"] == f"{first['cwd']}/tmp"
    assert first["home"] == first["cwd"]
    assert first["random"] != second["random"]
    assert "probe.py" in first["files"]
    assert "SECRET_OF_THE_HOST" not in first["env"]
    assert server.invoke({"do": "read", "path": "note"}, a) == {"read": "mine"}
