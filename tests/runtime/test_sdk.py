"""The SDK's own client for AgentCore Runtime, unmodified, found by the environment as a user's would be."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from bedrock_agentcore.runtime import AgentCoreRuntimeClient

from .conftest import AGENTS, Server, agent_fields, wait_for


@pytest.fixture
def sdk(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("", "_CONTROL"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_BEDROCK_AGENTCORE{name}", server.url)
    return AgentCoreRuntimeClient("us-west-2", session=boto3.Session("key", "secret", region_name="us-west-2"))


def test_sessions_are_used_and_stopped(server: Server, sdk: Any, session_id: str) -> None:
    reply = sdk.invoke_agent_runtime(agentRuntimeArn=server.arn, runtimeSessionId=session_id, payload=b'{"n": 1}')
    assert json.loads(reply["response"].read())["echo"] == {"n": 1}
    sdk.stop_runtime_session(agentRuntimeArn=server.arn, runtimeSessionId=session_id)
    assert wait_for(lambda: server.ended(session_id))["state"] == "stopped"


@pytest.mark.nightly
def test_agents_are_made_changed_and_removed(server: Server, sdk: Any) -> None:
    fields = agent_fields(AGENTS / "probe.py")
    made = sdk.create_agent_runtime_and_wait(agentRuntimeName="by_sdk", **fields)
    assert made["status"] == "READY"
    identity = made["agentRuntimeId"]
    updated = sdk.update_agent_runtime_and_wait(agentRuntimeId=identity, description="second", **fields)
    assert (updated["status"], updated["agentRuntimeVersion"]) == ("READY", "2")
    endpoint = sdk.create_agent_runtime_endpoint_and_wait(agentRuntimeId=identity, name="prod", agentRuntimeVersion="1")
    assert (endpoint["status"], endpoint["liveVersion"]) == ("READY", "1")
    sdk.update_agent_runtime_endpoint_and_wait(agentRuntimeId=identity, endpointName="prod", agentRuntimeVersion="2")
    assert [e["name"] for e in sdk.list_agent_runtime_endpoints(agentRuntimeId=identity)["runtimeEndpoints"]] == [
        "DEFAULT",
        "prod",
    ]
    sdk.teardown_endpoint_and_runtime(identity, "prod")
    assert identity not in [r["agentRuntimeId"] for r in sdk.list_agent_runtimes()["agentRuntimes"]]
