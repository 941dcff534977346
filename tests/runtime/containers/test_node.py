"""Agents that are container images: one container per session, by unmodified boto3, in a real engine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import Server, wait_for
from ..container_images import IMAGE, containers, podman

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Agent:
    """An image agent of a server."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.server = server
        state = server.settled(server.create(IMAGE, **fields))
        assert state["status"] == "READY", state.get("failureReason")
        self.arn = state["agentRuntimeArn"]

    def invoke(self, payload: Any, session_id: str) -> Any:
        try:
            reply = self.server.default_client.invoke_agent_runtime(
                agentRuntimeArn=self.arn, runtimeSessionId=session_id, payload=json.dumps(payload).encode()
            )
        except botocore.exceptions.ClientError as e:
            e.add_note(str(self.server.view.sessions(ended=True)))
            raise
        return json.loads(reply["response"].read())

    def stop(self, session_id: str) -> None:
        self.server.default_client.stop_runtime_session(agentRuntimeArn=self.arn, runtimeSessionId=session_id)

    def command(self, text: str, session_id: str, timeout: int = 30) -> tuple[str, str, dict[str, Any]]:
        """Standard output, standard error and how it ended."""
        reply = self.server.default_client.invoke_agent_runtime_command(
            agentRuntimeArn=self.arn, runtimeSessionId=session_id, body={"command": text, "timeout": timeout}
        )
        out, errors, end = "", "", {}
        for event in reply["stream"]:
            delta = event["chunk"].get("contentDelta", {})
            out, errors = out + delta.get("stdout", ""), errors + delta.get("stderr", "")
            end = event["chunk"].get("contentStop", end)
        return out, errors, end


@pytest.fixture(scope="module")
def server(engine_storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--set", "stop_grace=5", "--memory-mb", "96")
    options += ("--session-env", "GIVEN=yes")
    server = Server(tmp_path_factory.mktemp("runtime"), *options)
    yield server
    assert server.stop() == 0, server.output.read_text()
    assert containers() == []


@pytest.fixture(scope="module")
def agent(server: Server) -> Agent:
    return Agent(server, environmentVariables={"OWN": "variable"})


@pytest.fixture
def session_id(agent: Agent) -> Iterator[str]:
    session_id = new_session_id()
    yield session_id
    if agent.server.session(session_id) is not None:
        agent.server.view.stop(session_id)


@pytest.mark.system
def test_each_session_is_a_container_of_its_own(agent: Agent, session_id: str) -> None:
    other = new_session_id()
    first, again, second = (agent.invoke({}, s) for s in (session_id, session_id, other))
    assert first["host"] == again["host"] != second["host"]
    assert first["pid"] == 1
    assert len(containers()) == 2
    seen = agent.invoke({"do": "env"}, other)
    assert (seen["OWN"], seen["GIVEN"], seen["DOCKER_CONTAINER"]) == ("variable", "yes", "1")
    assert "SECRET_OF_THE_HOST" not in seen
    assert seen["PATH"].startswith("/usr/local/sbin")  # the image's, not this machine's
    agent.server.view.stop(other)
    wait_for(lambda: len(containers()) == 1)


@pytest.mark.nightly
def test_a_stopped_session_gets_sigterm_and_the_id_a_fresh_container(agent: Agent, session_id: str) -> None:
    before = agent.invoke({}, session_id)["host"]
    agent.stop(session_id)
    assert agent.invoke({}, session_id)["host"] != before
    ended = wait_for(lambda: agent.server.ended(session_id))
    assert (ended["state"], ended["exit_status"]) == ("stopped", 0)
    assert "stopping" in Path(ended["log"]).read_text()
    assert "listening" in "".join(agent.server.view.log(session_id))


@pytest.mark.system
def test_commands_run_in_the_sessions_container(agent: Agent, session_id: str) -> None:
    host = agent.invoke({}, session_id)["host"]
    out, errors, end = agent.command("cat /etc/hostname; echo wrong >&2; exit 4", session_id)
    assert (out.strip(), errors.strip(), end) == (host, "wrong", {"exitCode": 4, "status": "COMPLETED"})
    out, _, end = agent.command("echo begun; sleep 60 & wait", session_id, timeout=5)
    assert (out, end) == ("begun\n", {"exitCode": 137, "status": "TIMED_OUT"})
    assert "sleep 60" not in podman("top", containers()[0], "args")  # what the command had started is gone as well


@pytest.mark.nightly
def test_a_session_that_dies_is_a_424_and_leaves_nothing(agent: Agent, session_id: str) -> None:
    with pytest.raises(botocore.exceptions.ClientError, match="ended with status 7") as caught:
        agent.invoke({"do": "die"}, session_id)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424
    ended = wait_for(lambda: agent.server.ended(session_id))
    assert (ended["state"], ended["exit_status"]) == ("crashed", 7)
    assert "dying on purpose" in "".join(agent.server.view.log(session_id))
    wait_for(lambda: containers() == [])


@pytest.mark.nightly
def test_a_session_killed_for_its_memory_says_so(agent: Agent, session_id: str) -> None:
    with pytest.raises(botocore.exceptions.ClientError, match=r"memory limit \(96 MiB\)"):
        agent.invoke({"do": "fill", "mb": 200}, session_id)
    ended = wait_for(lambda: agent.server.ended(session_id))
    assert ended["state"] == "crashed"
    assert "memory limit" in ended["error"]


@pytest.mark.nightly
def test_an_image_that_does_not_start_is_a_424_with_its_own_words(server: Server) -> None:
    broken = Agent(server, environmentVariables={"FAIL": "no model was given"})
    session_id = new_session_id()
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        broken.invoke({}, session_id)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424
    [ended] = [s for s in server.view.sessions(ended=True) if s["session_id"] == session_id]
    assert ended["state"] == "failed_to_start"
    assert "status 1" in ended["error"]
    assert "cannot start: no model was given" in ended["error"]


@pytest.mark.nightly
def test_an_image_that_is_not_there_fails_the_creation(server: Server) -> None:
    state = server.settled(server.create("localhost/agentcore-rl-test/absent"))
    assert state["status"] == "CREATE_FAILED"
    assert "has no image 'localhost/agentcore-rl-test/absent'" in state["failureReason"]


@pytest.mark.nightly
def test_an_image_that_is_not_ready_in_time_is_a_424(engine_storage: Path, start_server: Callable[..., Server]) -> None:
    server = start_server("--set", "init_timeout=2")
    slow = Agent(server, environmentVariables={"SLOW": "60"})
    with pytest.raises(botocore.exceptions.ClientError, match="Runtime initialization time exceeded"):
        slow.invoke({}, new_session_id())
    wait_for(lambda: containers() == [])


@pytest.mark.system
def test_a_killed_runtimes_containers_go_and_nobody_elses(
    engine_storage: Path, start_server: Callable[..., Server]
) -> None:
    foreign = podman("create", "--name", "somebody", "--label", "agentcore-rl.runtime=/elsewhere", IMAGE)
    try:
        first = start_server()
        Agent(first).invoke({}, new_session_id())
        first.stop(signal.SIGKILL)
        assert len(containers()) == 2
        time.sleep(1.1)  # a root that was made this second might be of a runtime that is just starting
        second = start_server()
        Agent(second)
        assert containers() == ["somebody"]
    finally:
        podman("rm", foreign)
