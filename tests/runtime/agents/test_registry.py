"""The records of agents and the fields of their versions, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from agentcore_rl_toolkit.runtime.agents.registry import Registry
from agentcore_rl_toolkit.runtime.agents.version_fields import IDLE, LIFETIME, check_fields
from agentcore_rl_toolkit.runtime.wire import Target, WireError

from ..conftest import AGENTS, agent_fields

FIELDS = agent_fields(AGENTS / "bare.py")
CODE = {"code": {"s3": {"bucket": "b", "prefix": "p"}}, "runtime": "PYTHON_3_12", "entryPoint": ["main.py"]}
JWT = {"customJWTAuthorizer": {"discoveryUrl": "https://example.com/.well-known/openid-configuration"}}


def test_default_follows_the_newest_version_that_is_loaded() -> None:
    registry = Registry(region="us-west-2", account_id="123456789012", idle_timeout_s=900.0, max_lifetime_s=28_800.0)
    record = registry.create("a", FIELDS, salt="s")
    assert record.id == "a-654100f28c"  # the same after a restart
    first, second = record.latest, registry.update(record, FIELDS)
    for version, failure, status, follows in (
        (first, None, "READY", 1),
        (second, "no", "UPDATE_FAILED", 1),
        (second, None, "READY", 2),
        (first, "no", "CREATE_FAILED", 2),
        (first, None, "READY", 2),
    ):
        registry.set_loaded(version, failure)
        assert (version.status, record.endpoint("DEFAULT").version) == (status, follows)
    for account, region in (("123456789012", "x"), ("1", "us-west-2")):
        with pytest.raises(WireError, match="of another account or region not found"):
            registry.find(Target(record.id, account, region))
    assert registry.find(Target(record.id, "123456789012", "us-west-2")) is registry.records.pop(record.id)
    registry.set_loaded(second, None)  # its agent was removed while it was loaded


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None),
        ({"lifecycleConfiguration": {IDLE: 60, LIFETIME: 60}}, None),
        ({"lifecycleConfiguration": {IDLE: 28_800}}, None),
        ({"lifecycleConfiguration": {IDLE: 61, LIFETIME: 60}}, "lifecycleConfiguration"),
        ({"lifecycleConfiguration": {LIFETIME: 59}}, LIFETIME),
        ({"lifecycleConfiguration": {LIFETIME: 28_801}}, LIFETIME),
        ({"lifecycleConfiguration": {IDLE: 59}}, IDLE),
        ({"agentRuntimeArtifact": {"codeConfiguration": CODE}}, "agentRuntimeArtifact"),
        ({"authorizerConfiguration": JWT}, "authorizerConfiguration"),
        ({"protocolConfiguration": {"serverProtocol": "MCP"}}, "protocolConfiguration"),
    ],
)
def test_the_fields_of_a_version_are_checked(changes: dict[str, Any], field: str | None) -> None:
    body = {**FIELDS, "tags": {}, "clientToken": "c", "description": None, **changes}
    if field is None:
        assert check_fields(body) == {**FIELDS, "lifecycleConfiguration": {}, **changes}
        return
    with pytest.raises(WireError) as error:
        check_fields(body)
    assert error.value.code == "ValidationException"
    assert error.value.extra["fieldList"][0]["name"] == field
