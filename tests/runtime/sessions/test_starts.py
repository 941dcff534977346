"""How a session comes to be healthy, and what its callers hear when it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server, alive, wait_for


def test_an_agent_is_healthy_with_its_first_200(server: Server) -> None:
    made = server.create(AGENTS / "pings.py", environmentVariables={"PING": "late"})
    assert server.invoke({"a": 1}, arn=made["agentRuntimeArn"]) == {"got": {"a": 1}}
    server.delete(made)


def test_the_longest_id_starts(server: Server) -> None:
    session_id = new_session_id().ljust(256, "x")
    assert server.invoke({}, session_id)["session"] == session_id
    server.view.stop(session_id)


def test_an_id_is_no_path(server: Server, tmp_path: Path) -> None:
    session_id = f"{new_session_id()}/../../../../../../../..{tmp_path}/evil"
    reply = server.default_client.invoke_agent_runtime(
        agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=b'{"do": "print", "text": "found"}'
    )
    assert json.loads(reply["response"].read()) == {}
    assert list(tmp_path.rglob("*.log")) == []
    described = server.session(session_id)
    assert described is not None
    log = Path(described["log"])
    assert log.resolve().parent == (Path(server.view.get("/_local/status")["state_dir"]) / "logs" / "probe").resolve()
    assert "found" in log.read_text()


def test_one_id_at_two_endpoints_has_two_logs(server: Server, session_id: str) -> None:
    server.control.create_agent_runtime_endpoint(agentRuntimeId=server.arn.rpartition("/")[2], name="two")
    for qualifier in ("DEFAULT", "two"):
        server.default_client.invoke_agent_runtime(
            agentRuntimeArn=server.arn,
            runtimeSessionId=session_id,
            qualifier=qualifier,
            payload=json.dumps({"do": "print", "text": qualifier}).encode(),
        )["response"].read()
    found = [s for s in server.view.sessions() if s["session_id"] == session_id]
    logs = {s["endpoint"]: Path(s["log"]).read_text() for s in found}
    assert {name: name in text for name, text in logs.items()} == {"DEFAULT": True, "two": True}
    assert "two" not in logs["DEFAULT"]
    server.view.stop(session_id)


def test_an_agent_deleted_while_it_loads_leaves_nothing_behind(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    agent = tmp_path / "slow.py"
    agent.write_text(
        f"import os, time\nopen({str(tmp_path / 'began')!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n"
    )
    server = start_server("--writable", str(tmp_path), agent=AGENTS / "bare.py")
    made = server.create(agent)
    wait_for(lambda: (tmp_path / "began").exists() and (tmp_path / "began").read_text())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            server.default_client.invoke_agent_runtime,
            agentRuntimeArn=made["agentRuntimeArn"],
            runtimeSessionId=new_session_id(),
            payload=b"{}",
        )
        time.sleep(0.5)
        server.delete(made)
        with pytest.raises(ClientError) as failed:
            waiting.result(60)
    assert failed.value.response["Error"]["Code"] == "ResourceNotFoundException"
    wait_for(lambda: not alive(int((tmp_path / "began").read_text())))
    assert [t["runtime_id"] for t in server.view.get("/_local/status")["templates"]] == [server.arn.rpartition("/")[2]]
