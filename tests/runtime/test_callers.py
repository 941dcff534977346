"""Who may manage a runtime: the machine's user with any client, and no session, however it goes about it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.runtime import callers

from .conftest import AGENTS, Server

REBEL = AGENTS / "rebel.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds a connection")


def ask(server: Server, **payload: Any) -> Any:
    return server.invoke(payload, new_session_id())


def planted(server: Server, url: str, proof: Path) -> Any:
    """A session's attempt to deploy an agent that it has just written."""
    code = f"open({str(proof)!r}, 'w').write(open('/etc/hostname').read())"
    body = {"agentRuntimeName": "planted", "roleArn": "arn:aws:iam::123456789012:role/x"}
    return ask(server, do="request", method="PUT", url=f"{url}/runtimes/", body=body, code=code)


def names(server: Server) -> list[str]:
    return [agent["name"] for agent in server.view.get("/_local/status")["agents"]]


@pytest.mark.parametrize("network", ["host", "loopback"])
def test_a_session_cannot_deploy_through_its_own_runtime(
    start_server: Callable[..., Server], tmp_path: Path, network: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = ("--endpoint", f"127.0.0.1:{port}") if network == "loopback" else ()
    server = start_server("--network", network, "--port", str(port), *more, agent=REBEL)
    answer = planted(server, server.url, tmp_path / "proof")
    assert answer["status"] == 403
    assert "sessions" in answer["text"]
    assert "--credential" in answer["text"]
    assert names(server) == ["probe"]
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/_local/sessions"),
        ("DELETE", "/_local/sessions/a"),
        ("PUT", "/_local/faults"),
        ("POST", "/runtimes/"),
        ("GET", "/runtimes/x-0123456789/"),
        ("DELETE", "/runtimes/x-0123456789/"),
    ],
)
def test_a_session_cannot_manage_its_runtime(rebel: Server, method: str, path: str) -> None:
    assert ask(rebel, do="request", method=method, url=rebel.url + path, body=[])["status"] == 403


def test_a_session_may_use_its_runtime(rebel: Server) -> None:
    """As on AWS, where an agent may call another one."""
    path = f"/runtimes/{rebel.arn.replace('/', '%2F').replace(':', '%3A')}/invocations"
    assert ask(rebel, do="request", method="POST", url=rebel.url + path, body={"do": "look"})["status"] == 200


def test_a_command_beside_a_session_cannot_either(rebel: Server) -> None:
    script = f"import urllib.request as u; u.urlopen(u.Request('{rebel.url}/_local/sessions'))"
    reply = rebel.default_client.invoke_agent_runtime_command(
        agentRuntimeArn=rebel.arn,
        runtimeSessionId=new_session_id(),
        body={"command": f'{sys.executable} -c "{script}"', "timeout": 20},
    )
    assert "HTTP Error 403" in str(list(reply["stream"]))


@pytest.mark.parametrize("way", ["reset", "in flight"])
def test_a_sender_that_cannot_be_found_is_refused(rebel: Server, way: str) -> None:
    """A session that hides as the sender of a request: the victim is a live session that it would stop."""
    victim = new_session_id()
    rebel.invoke({"do": "look"}, victim)
    ask(rebel, do=way, method="DELETE", url=f"{rebel.url}/_local/sessions/{victim}")
    time.sleep(1.0)
    assert rebel.session(victim) is not None


def test_sessions_of_another_runtime_are_refused(rebel: Server, start_server: Callable[..., Server]) -> None:
    other = start_server()
    assert ask(rebel, do="request", method="GET", url=f"{other.url}/_local/sessions")["status"] == 403
    assert other.view.sessions() == []


def test_clients_of_this_machine_need_nothing(rebel: Server) -> None:
    control = rebel.client("bedrock-agentcore-control")
    assert [r["agentRuntimeName"] for r in control.list_agent_runtimes()["agentRuntimes"]] == ["probe"]
    rebel.view.sessions()
    script = f"import urllib.request as u; print(u.urlopen('{rebel.url}/_local/sessions').status)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "200"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_other_users_of_this_machine_are_refused(rebel: Server) -> None:
    script = f"""
import os, urllib.request, urllib.error
os.setgid(65534); os.setuid(65534)
try:
    print(urllib.request.urlopen('{rebel.url}/_local/sessions').status)
except urllib.error.HTTPError as e:
    print(e.code, e.read().decode())
"""
    done = subprocess.run(["/usr/bin/python3", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.startswith("403")
    assert "other users" in done.stdout


def test_with_a_credential_the_signature_decides(start_server: Callable[..., Server]) -> None:
    server = start_server("--credential", "AKLOCAL:secret", agent=REBEL)
    assert ask(server, do="request", method="GET", url=f"{server.url}/_local/sessions")["status"] == 403
    control = server.client("bedrock-agentcore-control")
    assert len(control.list_agent_runtimes()["agentRuntimes"]) == 1
    with pytest.raises(ClientError, match="not found"):
        control.get_agent_runtime(agentRuntimeId="none-0123456789")


def test_sessions_have_a_key_to_the_store_and_not_to_the_runtime(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    options = ("--credential", "AKLOCAL:secret", "--s3-dir", str(tmp_path / "s3"))
    server = start_server(*options, agent=AGENTS / "stores.py")
    assert ask(server, url=server.url) == {"note": "mine", "refused": "AccessDeniedException"}
    assert (tmp_path / "s3" / "kept").is_dir()


def test_counters_are_open(rebel: Server) -> None:
    answer = ask(rebel, do="request", method="GET", url=f"{rebel.url}/_local/status")
    assert answer["status"] == 200
    assert json.loads(answer["text"])["quotas"] == "unlimited"


@pytest.fixture(scope="module")
def rebel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(tmp_path_factory.mktemp("rebel"), agent=REBEL)
    yield server
    assert server.stop() == 0, server.output.read_text()


@pytest.mark.parametrize(
    ("listening", "calling"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")], ids=str
)
def test_asking_the_kernel_for_one_socket_and_reading_all_of_them_agree(listening: str, calling: str) -> None:
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    with (
        socket.create_server((listening, 0), family=family, dualstack_ipv6=listening == "::") as listener,
        socket.create_connection((calling, listener.getsockname()[1])) as ours,
    ):
        theirs, _ = listener.accept()
        with theirs:
            client, server = theirs.getpeername()[:2], theirs.getsockname()[:2]
            expected = (os.getuid(), os.fstat(ours.fileno()).st_ino)
            assert callers._ask_for(client, server) == callers._look_for(client, server) == expected
            ours.close()
            assert callers._ask_for(client, server) is callers._look_for(client, server) is None
        nobody = ("::1" if ":" in calling else calling, listener.getsockname()[1])
        assert callers._ask_for(nobody, (nobody[0], 1)) is None  # not what listens there
