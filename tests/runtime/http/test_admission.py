"""Who may manage a runtime: the machine's user with any client, and no session, however it goes about it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import AGENTS, Server, wait_for

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
    rebel: Server, start_server: Callable[..., Server], reserve_port: Any, tmp_path: Path, network: str
) -> None:
    server = rebel
    if network == "loopback":
        with reserve_port() as port:
            options = ("--network", network, "--port", str(port), "--endpoint", f"127.0.0.1:{port}")
            server = start_server(*options, agent=REBEL)
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


SESSION = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
WAYS: dict[str, tuple[str, str, Any, dict[str, str]]] = {
    "invoke": ("POST", "invocations", {"do": "look"}, {}),
    "command": ("POST", "commands", {"command": "id"}, {}),
    "stop": ("POST", "stopruntimesession", {}, {}),
    "card": ("GET", "invocations/.well-known/agent-card.json", None, {}),
    "socket": ("GET", "ws", None, UPGRADE),
    "shell": ("GET", "ws/shells", None, UPGRADE),
}


def call_from_inside(server: Server, way: str, target: str | None, caller: str, arn: str | None = None) -> Any:
    """What session ``caller`` gets when it does something with session ``target`` through the runtime's own port."""
    method, operation, body, headers = WAYS[way]
    path = f"/runtimes/{(arn or server.arn).replace('/', '%2F').replace(':', '%3A')}/{operation}"
    headers = {**headers, **({SESSION: target} if target is not None else {})}
    return server.invoke(
        {"do": "request", "method": method, "url": server.url + path, "body": body, "headers": headers}, caller
    )


@pytest.fixture(scope="module", params=["namespaces", "namespaces without a network", "landlock"])
def confined(request: pytest.FixtureRequest, reserve_port: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A runtime whose sessions reach its port: over the host's network, or by a relay."""
    options = ["--isolation", request.param.partition(" ")[0]]
    with reserve_port() as port:
        if "without" in request.param:
            options += ["--port", str(port), "--network", "loopback", "--endpoint", f"127.0.0.1:{port}"]
        server = Server(tmp_path_factory.mktemp("confined"), *options, agent=REBEL)
    yield server
    assert server.stop() == 0, server.output.read_text()


@pytest.mark.parametrize("way", WAYS)
def test_a_session_cannot_reach_another_session(confined: Server, way: str) -> None:
    victim, attacker = new_session_id(), new_session_id()
    confined.invoke({"do": "look"}, victim)
    answer = call_from_inside(confined, way, victim, attacker)
    assert answer["status"] == 403
    assert "own session only" in answer["text"]
    found = confined.session(victim)
    assert found is not None
    assert found["invocations"] == 1


@pytest.mark.parametrize("way", ["invoke", "command", "card", "shell"])
def test_a_session_may_call_itself(confined: Server, way: str) -> None:
    me = new_session_id()
    if way == "shell" and confined.info["isolation"] == "landlock":
        pytest.skip("no terminals there")
    answer = call_from_inside(confined, way, me, me)
    assert answer["status"] in (200, 101, 424 if way == "card" else 200), answer  # this agent has no card


def test_a_session_may_end_itself(confined: Server) -> None:
    me = new_session_id()
    with contextlib.suppress(ClientError):  # where it does not get to answer
        call_from_inside(confined, "stop", me, me)
    wait_for(lambda: confined.ended(me))


@pytest.mark.parametrize("target", [None, "fresh"])
def test_a_session_cannot_start_sessions(confined: Server, target: str | None) -> None:
    before = confined.view.get("/_local/status")["started"]
    answer = call_from_inside(confined, "invoke", new_session_id() if target else None, new_session_id())
    assert answer["status"] == 403
    assert confined.view.get("/_local/status")["started"] == before + 1  # the caller


def test_a_command_beside_a_session_is_that_session(confined: Server) -> None:
    mine, other = new_session_id(), new_session_id()
    confined.invoke({"do": "look"}, other)
    path = f"{confined.url}/runtimes/{confined.arn.replace('/', '%2F').replace(':', '%3A')}/invocations"
    script = f"""
import json, urllib.error, urllib.request
for target in {mine!r}, {other!r}:
    try:
        request = urllib.request.Request({path!r}, json.dumps({{"do": "look"}}).encode(), {{{SESSION!r}: target}})
        print(urllib.request.urlopen(request).status)
    except urllib.error.HTTPError as e:
        print(e.code)
"""
    reply = confined.default_client.invoke_agent_runtime_command(
        agentRuntimeArn=confined.arn,
        runtimeSessionId=mine,
        body={"command": f"{sys.executable} - <<'EOF'\n{script}\nEOF", "timeout": 20},
    )
    deltas = [e["chunk"].get("contentDelta", {}) for e in reply["stream"]]
    output = "".join(delta.get("stdout", "") for delta in deltas)
    assert output.split() == ["200", "403"]


def test_a_session_cannot_reach_the_server_of_another(confined: Server) -> None:
    victim, attacker = new_session_id(), new_session_id()
    confined.invoke({"do": "look"}, victim)
    root = str(Path(confined.view.get("/_local/status")["state_dir"]).parent)
    answers = confined.invoke({"do": "servers", "below": root}, attacker)
    assert [how for how in answers.values() if how[0] == "done" and how[1]] == []
    if confined.info["isolation"] == "landlock":
        assert len(answers) >= 2  # it found them


def test_open_pages_name_nothing_to_a_session(confined: Server) -> None:
    victim = new_session_id()
    confined.invoke({"do": "look"}, victim)
    for page in ("status", "metrics"):
        answer = ask(confined, do="request", method="GET", url=f"{confined.url}/_local/{page}")
        assert answer["status"] == 200
        for secret in (victim, "probe", "arn:", confined.arn, str(Path.home()), "/tmp"):
            assert secret not in answer["text"]


def test_a_session_learns_nothing_of_how_another_ended(confined: Server) -> None:
    victim = new_session_id()
    confined.invoke({"do": "look"}, victim)
    confined.view.stop(victim)
    wait_for(lambda: confined.ended(victim))
    question = {"agentRuntimeArn": confined.arn, "sessions": [victim]}
    reply = json.loads(confined.view.call("POST", "/_local/endings", question))["ended"]
    assert reply[victim]["cause"] == "the session was stopped by a request to its runtime"
    answer = ask(confined, do="request", method="POST", url=f"{confined.url}/_local/endings", body=question)
    assert (answer["status"], json.loads(answer["text"])) == (200, {"ended": {}})


def test_agents_may_call_agents_where_that_is_allowed(start_server: Callable[..., Server]) -> None:
    server = start_server("--session-calls", "started", agent=REBEL)
    victim, caller, fresh = (new_session_id() for _ in range(3))
    server.invoke({"do": "look"}, victim)
    for _ in range(2):  # it starts it, then it calls it
        assert call_from_inside(server, "invoke", fresh, caller)["status"] == 200
    assert call_from_inside(server, "invoke", None, caller)["status"] == 200
    assert call_from_inside(server, "invoke", victim, caller)["status"] == 403
    assert call_from_inside(server, "invoke", fresh, victim)["status"] == 403  # somebody else's


@pytest.mark.parametrize("tier", ["namespaces", "landlock", "process"])
def test_a_session_cannot_call_another_runtime(
    rebel: Server, elsewhere: Server, start_server: Callable[..., Server], tier: str
) -> None:
    one = rebel if rebel.info["isolation"] == tier else start_server("--isolation", tier, agent=REBEL)
    victim = new_session_id()
    elsewhere.invoke({"do": "look"}, victim)
    path = f"/runtimes/{elsewhere.arn.replace('/', '%2F').replace(':', '%3A')}/invocations"
    body: Any = {"do": "look"}
    answer = ask(one, do="request", method="POST", url=elsewhere.url + path, body=body, headers={SESSION: victim})
    assert answer["status"] == 403


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


def test_sessions_of_another_runtime_are_refused(rebel: Server, elsewhere: Server) -> None:
    assert ask(rebel, do="request", method="GET", url=f"{elsewhere.url}/_local/sessions")["status"] == 403


def test_clients_of_this_machine_need_nothing(rebel: Server) -> None:
    control = rebel.client("bedrock-agentcore-control")
    assert [r["agentRuntimeName"] for r in control.list_agent_runtimes()["agentRuntimes"]] == ["probe"]
    rebel.view.sessions()
    script = f"import urllib.request as u; print(u.urlopen('{rebel.url}/_local/sessions').status)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "200"


def test_other_users_of_this_machine_are_refused(
    rebel: Server, start_server: Callable[..., Server], as_another_user: Callable[..., str]
) -> None:
    look = '{"do": "look"}'
    answer = as_another_user(f"{rebel.url}/_local/sessions")
    assert answer.startswith("403")
    assert "other users" in answer
    victim = new_session_id()
    rebel.invoke({"do": "look"}, victim)
    arn = rebel.arn.replace("/", "%2F").replace(":", "%3A")
    for operation in ("invocations", "commands", "stopruntimesession"):
        answer = as_another_user(f"{rebel.url}/runtimes/{arn}/{operation}", look, **{SESSION: victim})
        assert answer.startswith("403")
        assert "other users" in answer
    found = rebel.session(victim)
    assert found is not None
    assert found["invocations"] == 1
    opened = start_server("--callers", "any", agent=REBEL)
    arn = opened.arn.replace("/", "%2F").replace(":", "%3A")
    assert as_another_user(f"{opened.url}/runtimes/{arn}/invocations", look, **{SESSION: victim}) == "200"
    assert as_another_user(f"{opened.url}/_local/sessions").startswith("403")


def test_with_a_credential_the_signature_decides(start_server: Callable[..., Server]) -> None:
    server = start_server(credential="AKLOCAL:secret", agent=REBEL)
    assert ask(server, do="request", method="GET", url=f"{server.url}/_local/sessions")["status"] == 403
    control = server.client("bedrock-agentcore-control")
    assert len(control.list_agent_runtimes()["agentRuntimes"]) == 1
    with pytest.raises(ClientError, match="not found"):
        control.get_agent_runtime(agentRuntimeId="none-0123456789")


@pytest.fixture(scope="module")
def rebel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = Server(tmp_path_factory.mktemp("rebel"), agent=REBEL)
    yield server
    assert server.stop() == 0, server.output.read_text()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Another runtime of this machine."""
    server = Server(tmp_path_factory.mktemp("elsewhere"), agent=REBEL)
    yield server
    assert server.stop() == 0, server.output.read_text()
