"""Versions that come and go under an agent that is in use, as unmodified boto3 sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import Server, wait_for

ROLE = "arn:aws:iam::123456789012:role/agent"
NETWORK = {"networkMode": "PUBLIC"}
AGENT = """
import os, time
from bedrock_agentcore import BedrockAgentCoreApp
time.sleep({delay_s})
{trouble}
app = BedrockAgentCoreApp()
@app.entrypoint
def answer(payload):
    return {{"version": {name!r}}}
if __name__ == "__main__":
    app.run()
"""


def artifact(folder: Path, name: str, *, delay_s: float = 0.0, trouble: str = "") -> dict[str, Any]:
    path = folder / f"{name}.py"
    path.write_text(AGENT.format(name=name, delay_s=delay_s, trouble=trouble))
    return {"containerConfiguration": {"containerUri": f"local://{path}"}}


@pytest.fixture(scope="module")
def control(server: Server) -> Any:
    return server.client("bedrock-agentcore-control")


@pytest.fixture
def made(control: Any, tmp_path: Path) -> Iterator[dict[str, Any]]:
    name = f"a{new_session_id()[:12].replace('-', '_')}"
    created = control.create_agent_runtime(
        agentRuntimeName=name,
        agentRuntimeArtifact=artifact(tmp_path, "one"),
        roleArn=ROLE,
        networkConfiguration=NETWORK,
    )
    yield created
    control.delete_agent_runtime(agentRuntimeId=created["agentRuntimeId"])


def update(control: Any, made: dict[str, Any], what: dict[str, Any]) -> str:
    return str(
        control.update_agent_runtime(
            agentRuntimeId=made["agentRuntimeId"],
            agentRuntimeArtifact=what,
            roleArn=ROLE,
            networkConfiguration=NETWORK,
        )["agentRuntimeVersion"]
    )


def settled(control: Any, made: dict[str, Any], version: str) -> str:
    def look() -> str:
        got = control.get_agent_runtime(agentRuntimeId=made["agentRuntimeId"], agentRuntimeVersion=version)
        return "" if got["status"].endswith("ING") else str(got["status"])

    return str(wait_for(look))


def endpoint(control: Any, made: dict[str, Any]) -> tuple[str, str]:
    got = control.get_agent_runtime_endpoint(agentRuntimeId=made["agentRuntimeId"], endpointName="DEFAULT")
    return got["liveVersion"], got["status"]


def ask(server: Server, made: dict[str, Any], session_id: str | None = None) -> Any:
    reply = server.default_client.invoke_agent_runtime(
        agentRuntimeArn=made["agentRuntimeArn"], runtimeSessionId=session_id or new_session_id(), payload=b"{}"
    )
    return json.loads(reply["response"].read())["version"]


def test_an_update_that_does_not_load_leaves_the_agent_as_it_was(
    server: Server, control: Any, made: dict[str, Any], tmp_path: Path
) -> None:
    session_id = new_session_id()
    assert ask(server, made, session_id) == "one"
    assert endpoint(control, made) == ("1", "READY")
    version = update(control, made, artifact(tmp_path, "bad", trouble="raise RuntimeError('not today')"))
    assert settled(control, made, version) == "UPDATE_FAILED"
    assert endpoint(control, made) == ("1", "READY")
    assert (ask(server, made), ask(server, made, session_id)) == ("one", "one")
    assert update(control, made, artifact(tmp_path, "three")) == "3"
    assert settled(control, made, "3") == "READY"
    assert endpoint(control, made) == ("3", "READY")
    assert ask(server, made) == "three"


def test_calls_do_not_wait_for_an_update(server: Server, control: Any, made: dict[str, Any], tmp_path: Path) -> None:
    session_id = new_session_id()
    assert ask(server, made, session_id) == "one"
    update(control, made, artifact(tmp_path, "slow", delay_s=4.0))
    assert (ask(server, made, session_id), ask(server, made)) == ("one", "one")
    assert endpoint(control, made) == ("1", "READY")  # all that, before it was loaded
    assert settled(control, made, "2") == "READY"
    assert (ask(server, made, session_id), ask(server, made)) == ("one", "slow")


def test_an_agent_that_failed_serves_once_an_update_loads(server: Server, control: Any, tmp_path: Path) -> None:
    made = control.create_agent_runtime(
        agentRuntimeName="phoenix",
        agentRuntimeArtifact=artifact(tmp_path, "bad", trouble="raise RuntimeError('not today')"),
        roleArn=ROLE,
        networkConfiguration=NETWORK,
    )
    assert settled(control, made, "1") == "CREATE_FAILED"
    with pytest.raises(ClientError) as error:
        ask(server, made)
    assert error.value.response["Error"]["Code"] == "RuntimeClientError"
    assert "not today" in error.value.response["Error"]["Message"]
    update(control, made, artifact(tmp_path, "good", delay_s=1.0))
    assert ask(server, made) == "good"  # there is nothing else to serve: this call waits
    control.delete_agent_runtime(agentRuntimeId=made["agentRuntimeId"])


def test_an_endpoint_is_aimed_at_a_version_that_is_loaded(
    server: Server, control: Any, made: dict[str, Any], tmp_path: Path
) -> None:
    identity = made["agentRuntimeId"]
    assert ask(server, made) == "one"
    control.create_agent_runtime_endpoint(agentRuntimeId=identity, name="prod", agentRuntimeVersion="1")
    settled(control, made, update(control, made, artifact(tmp_path, "bad", trouble="raise RuntimeError('no')")))
    slow = update(control, made, artifact(tmp_path, "slow", delay_s=2.0))
    for version in ("2", slow):  # failed, and not yet loaded
        with pytest.raises(ClientError) as error:
            control.update_agent_runtime_endpoint(
                agentRuntimeId=identity, endpointName="prod", agentRuntimeVersion=version
            )
        assert error.value.response["Error"]["Code"] == "ConflictException"
    settled(control, made, slow)
    control.update_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod", agentRuntimeVersion=slow)
    got = control.get_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod")
    assert (got["liveVersion"], got["status"]) == (slow, "READY")
