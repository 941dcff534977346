"""The control plane as unmodified boto3 sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from ..conftest import AGENTS, Server, agent_fields, wait_for

FIELDS = agent_fields(AGENTS / "bare.py")


def code(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    return error.value.response["ResponseMetadata"]["HTTPStatusCode"], error.value.response["Error"]["Code"]


@pytest.fixture(scope="module")
def created(server: Server) -> Iterator[dict[str, Any]]:
    made = server.create(
        agentRuntimeName="second",
        description="for tests",
        environmentVariables={"FLAVOUR": "sour"},
        requestHeaderConfiguration={"requestHeaderAllowlist": ["X-Amzn-Bedrock-AgentCore-Runtime-Custom-A"]},
        lifecycleConfiguration={"idleRuntimeSessionTimeout": 120, "maxLifetime": 600},
    )
    assert (made["status"], made["agentRuntimeVersion"]) == ("CREATING", "1")
    yield made
    server.delete(made)


def test_what_was_written_is_read_back(server: Server, created: dict[str, Any]) -> None:
    got = server.settled(created)
    assert got["status"] == "READY", got.get("failureReason")
    assert got["agentRuntimeArn"] == created["agentRuntimeArn"]
    assert {name: got[name] for name in FIELDS} == FIELDS
    assert got["lifecycleConfiguration"] == {"idleRuntimeSessionTimeout": 120, "maxLifetime": 600}
    assert got["description"] == "for tests"


def test_update_makes_a_version_that_default_follows_and_other_endpoints_do_not(
    server: Server, created: dict[str, Any]
) -> None:
    identity, arn, control = created["agentRuntimeId"], created["agentRuntimeArn"], server.control
    endpoint = control.create_agent_runtime_endpoint(agentRuntimeId=identity, name="prod", agentRuntimeVersion="1")
    assert endpoint["agentRuntimeEndpointArn"] == f"{arn}/runtime-endpoint/prod"
    updated = control.update_agent_runtime(agentRuntimeId=identity, **FIELDS, environmentVariables={"FLAVOUR": "sweet"})
    assert updated["agentRuntimeVersion"] == "2"
    assert server.settled(created)["status"] == "READY"  # until then the first one serves
    tastes = {}
    for qualifier in ("DEFAULT", "prod"):
        reply = server.default_client.invoke_agent_runtime(
            agentRuntimeArn=arn, qualifier=qualifier, payload=b'{"do": "where"}'
        )
        tastes[qualifier] = json.loads(reply["response"].read())["env"]["FLAVOUR"]
    assert tastes == {"DEFAULT": "sweet", "prod": "sour"}
    listed = control.list_agent_runtime_endpoints(agentRuntimeId=identity)["runtimeEndpoints"]
    assert {e["name"]: e["liveVersion"] for e in listed} == {"DEFAULT": "2", "prod": "1"}
    with pytest.raises(ClientError) as error:
        control.update_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="DEFAULT", agentRuntimeVersion="1")
    assert code(error) == (409, "ConflictException")
    control.update_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod", agentRuntimeVersion="2")
    assert control.get_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod")["liveVersion"] == "2"
    control.delete_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod")
    with pytest.raises(ClientError) as error:
        control.get_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod")
    assert code(error) == (404, "ResourceNotFoundException")


def test_a_taken_name_is_409(server: Server, created: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as error:
        server.create(agentRuntimeName="second")
    assert code(error) == (409, "ConflictException")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("local:///does/not/exist.py", "there is no agent file"),
        (f"local://{AGENTS / 'broken.py'}", "nothing_of_this_name"),
    ],
)
def test_what_cannot_be_loaded_is_create_failed_with_the_reason(server: Server, uri: str, reason: str) -> None:
    made = server.create(uri)
    got = server.settled(made)
    server.delete(made)
    assert got["status"] == "CREATE_FAILED"
    assert reason in got["failureReason"]


def test_delete_stops_sessions_and_forgets(server: Server, session_id: str) -> None:
    made = server.create()
    server.default_client.invoke_agent_runtime(
        agentRuntimeArn=made["agentRuntimeArn"], runtimeSessionId=session_id, payload=b"{}"
    )
    server.delete(made)
    wait_for(lambda: server.ended(session_id))
    for call in (
        lambda: server.control.get_agent_runtime(agentRuntimeId=made["agentRuntimeId"]),
        lambda: server.default_client.invoke_agent_runtime(agentRuntimeArn=made["agentRuntimeArn"], payload=b"{}"),
    ):
        with pytest.raises(ClientError) as error:
            call()
        assert code(error) == (404, "ResourceNotFoundException")


def test_what_a_lifecycle_leaves_open_is_the_runtimes_own(start_server: Callable[..., Server]) -> None:
    server = start_server("--set", "idle_timeout=2", "--set", "max_lifetime=7199.5", agent=AGENTS / "bare.py")
    made = server.create()
    identity, control = made["agentRuntimeId"], server.control
    assert server.settled(made)["lifecycleConfiguration"] == {"idleRuntimeSessionTimeout": 2, "maxLifetime": 7200}
    for given, idle, lifetime in (({"idleRuntimeSessionTimeout": 70}, 70, 7200), ({"maxLifetime": 60}, 2, 60)):
        control.update_agent_runtime(agentRuntimeId=identity, lifecycleConfiguration=given, **FIELDS)
        got = server.settled(made)["lifecycleConfiguration"]
        assert got == {"idleRuntimeSessionTimeout": idle, "maxLifetime": lifetime}
    control.update_agent_runtime(agentRuntimeId=identity, **FIELDS)  # an update replaces everything
    assert server.settled(made)["lifecycleConfiguration"]["maxLifetime"] == 7200
    probe = control.get_agent_runtime(agentRuntimeId=server.arn.rpartition("/")[2])
    assert probe["lifecycleConfiguration"]["idleRuntimeSessionTimeout"] == 2
