"""Versions that come and go under an agent that is in use, as unmodified boto3 sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.contract import new_session_id

from ..conftest import Server, agent_fields, write_agent

AGENT = """
import time
time.sleep({delay_s})
{trouble}
async def answer(payload, session):
    return {{"version": {name!r}}}
"""


def script(folder: Path, name: str, *, delay_s: float = 0.0, trouble: str = "") -> Path:
    return write_agent(folder / f"{name}.py", AGENT.format(name=name, delay_s=delay_s, trouble=trouble))


@pytest.fixture
def made(server: Server, tmp_path: Path) -> Iterator[dict[str, Any]]:
    created = server.create(script(tmp_path, "one"))
    yield created
    server.delete(created)


def update(server: Server, made: dict[str, Any], what: Path) -> str:
    changed = server.control.update_agent_runtime(agentRuntimeId=made["agentRuntimeId"], **agent_fields(what))
    return str(changed["agentRuntimeVersion"])


def status(server: Server, made: dict[str, Any], version: str) -> str:
    return str(server.settled(made, agentRuntimeVersion=version)["status"])


def endpoint(server: Server, made: dict[str, Any], name: str = "DEFAULT") -> tuple[str, str]:
    got = server.control.get_agent_runtime_endpoint(agentRuntimeId=made["agentRuntimeId"], endpointName=name)
    return got["liveVersion"], got["status"]


def ask(server: Server, made: dict[str, Any], session_id: str | None = None) -> Any:
    reply = server.default_client.invoke_agent_runtime(
        agentRuntimeArn=made["agentRuntimeArn"], runtimeSessionId=session_id or new_session_id(), payload=b"{}"
    )
    return json.loads(reply["response"].read())["version"]


def test_an_update_that_does_not_load_leaves_the_agent_as_it_was(
    server: Server, made: dict[str, Any], tmp_path: Path
) -> None:
    session_id = new_session_id()
    assert ask(server, made, session_id) == "one"
    assert endpoint(server, made) == ("1", "READY")
    version = update(server, made, script(tmp_path, "bad", trouble="raise RuntimeError('not today')"))
    assert status(server, made, version) == "UPDATE_FAILED"
    assert endpoint(server, made) == ("1", "READY")
    assert (ask(server, made), ask(server, made, session_id)) == ("one", "one")
    assert update(server, made, script(tmp_path, "three")) == "3"
    assert status(server, made, "3") == "READY"
    assert endpoint(server, made) == ("3", "READY")
    assert ask(server, made) == "three"


def test_calls_do_not_wait_for_an_update(server: Server, made: dict[str, Any], tmp_path: Path) -> None:
    session_id = new_session_id()
    assert ask(server, made, session_id) == "one"
    update(server, made, script(tmp_path, "slow", delay_s=1.5))
    assert (ask(server, made, session_id), ask(server, made)) == ("one", "one")
    assert endpoint(server, made) == ("1", "READY")  # all that, before it was loaded
    assert status(server, made, "2") == "READY"
    assert (ask(server, made, session_id), ask(server, made)) == ("one", "slow")


def test_an_agent_that_failed_serves_once_an_update_loads(server: Server, tmp_path: Path) -> None:
    made = server.create(script(tmp_path, "bad", trouble="raise RuntimeError('not today')"))
    assert status(server, made, "1") == "CREATE_FAILED"
    with pytest.raises(ClientError) as error:
        ask(server, made)
    assert error.value.response["Error"]["Code"] == "RuntimeClientError"
    assert "not today" in error.value.response["Error"]["Message"]
    update(server, made, script(tmp_path, "good", delay_s=0.5))
    assert ask(server, made) == "good"  # there is nothing else to serve: this call waits
    server.delete(made)


def test_an_endpoint_is_aimed_at_a_version_that_is_loaded(server: Server, made: dict[str, Any], tmp_path: Path) -> None:
    identity, control = made["agentRuntimeId"], server.control
    assert ask(server, made) == "one"
    control.create_agent_runtime_endpoint(agentRuntimeId=identity, name="prod", agentRuntimeVersion="1")
    status(server, made, update(server, made, script(tmp_path, "bad", trouble="raise RuntimeError('no')")))
    slow = update(server, made, script(tmp_path, "slow", delay_s=1.2))
    for version, why in (("2", ".*RuntimeError: no"), (slow, "it is being loaded")):
        with pytest.raises(ClientError, match=f"(?s)Version {version} is not ready: {why}") as error:
            control.update_agent_runtime_endpoint(
                agentRuntimeId=identity, endpointName="prod", agentRuntimeVersion=version
            )
        assert error.value.response["Error"]["Code"] == "ConflictException"
    status(server, made, slow)
    control.update_agent_runtime_endpoint(agentRuntimeId=identity, endpointName="prod", agentRuntimeVersion=slow)
    assert endpoint(server, made, "prod") == (slow, "READY")


def test_an_endpoint_that_returns_to_a_version_serves_its_code_as_it_was_loaded(
    server: Server, made: dict[str, Any], tmp_path: Path
) -> None:
    about = {"agentRuntimeId": made["agentRuntimeId"]}
    assert status(server, made, "1") == "READY"
    server.control.create_agent_runtime_endpoint(**about, name="prod", agentRuntimeVersion="1")
    assert status(server, made, update(server, made, script(tmp_path, "two"))) == "READY"
    script(tmp_path, "new").rename(tmp_path / "one.py")
    for version in ("2", "1"):
        server.control.update_agent_runtime_endpoint(**about, endpointName="prod", agentRuntimeVersion=version)
    reply = server.default_client.invoke_agent_runtime(
        agentRuntimeArn=made["agentRuntimeArn"], qualifier="prod", runtimeSessionId=new_session_id(), payload=b"{}"
    )
    assert json.loads(reply["response"].read()) == {"version": "one"}
