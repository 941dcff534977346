"""The fields of an agent version, and tags: what a request may set, and what is not served here.

Source: botocore service model `bedrock-agentcore-control` 2023-06-05. What it has and this runtime cannot do is refused: an
agent that seems to have an authorizer, or a file system, and has none, is worse than one that does not deploy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..wire import WireError, invalid
from .lifecycle import check_lifecycle

LOCAL_ARTIFACT = "local://"
MAX_TAGS = 50
_NOT_SERVED = {
    "authorizerConfiguration": "nobody would be asked for a token",
    "filesystemConfigurations": "nothing would be mounted",
    "capacityProviderConfiguration": "sessions run on this machine",
    "allowedPorts": "sessions have no ports of their own",
    "hooksConfiguration": "no hook would run",
}
_STORED = (
    "agentRuntimeArtifact",
    "roleArn",
    "networkConfiguration",
    "description",
    "requestHeaderConfiguration",
    "protocolConfiguration",
    "metadataConfiguration",
    "environmentVariables",
    "platformVersion",
    "resourceConfigurations",
)
_ROLE = re.compile(r"arn:aws(-[^:]+)?:iam::([0-9]{12})?:role/.+")
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,255}")


def check_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a version. Raises: WireError 400 for what AWS refuses, and for what is not served here."""
    for name, why in _NOT_SERVED.items():
        if body.get(name):
            raise invalid(f"{name} is not served by the local runtime ({why}); leave it out here", field=name)
    role = body.get("roleArn")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise invalid(f"roleArn must be like arn:aws:iam::123456789012:role/NAME, got {role!r}", field="roleArn")
    _check_artifact(body)
    network = _object(body, "networkConfiguration") or {"networkMode": "PUBLIC"}
    _one_of(network, "networkMode", ("PUBLIC", "VPC"))
    protocol = _object(body, "protocolConfiguration")
    if protocol:
        _one_of(protocol, "serverProtocol", ("HTTP", "MCP", "A2A", "AGUI"))
        if not isinstance(protocol.get("path", ""), str):
            raise invalid("path must be a string", field="path")
    allowed = _object(body, "requestHeaderConfiguration").get("requestHeaderAllowlist", [])
    if not isinstance(allowed, list) or not all(isinstance(n, str) and _HEADER.fullmatch(n) for n in allowed):
        raise invalid("requestHeaderAllowlist must be header names", field="requestHeaderAllowlist")
    _check_variables(_object(body, "environmentVariables"))
    fields = {name: body[name] for name in _STORED if body.get(name) is not None}
    fields["lifecycleConfiguration"] = check_lifecycle(body.get("lifecycleConfiguration"))
    fields["networkConfiguration"] = network
    return fields


def check_tags(tags: Any) -> dict[str, str]:
    """Tags of a request, none for None. Raises: WireError 400."""
    given = {} if tags is None else tags
    if not isinstance(given, dict) or not all(isinstance(v, str) and len(v) <= 256 for v in given.values()):
        raise invalid("tags must be an object of strings of up to 256 characters", field="tags")
    refuse_more_tags(given)
    return dict(given)


def refuse_more_tags(tags: Mapping[str, str]) -> None:
    """Raises: WireError 402 above the limit."""
    if len(tags) > MAX_TAGS:
        raise WireError("ServiceQuotaExceededException", f"{MAX_TAGS} tags per resource are the limit")


def _check_artifact(body: Mapping[str, Any]) -> None:
    field = "agentRuntimeArtifact"
    artifact = _object(body, field)
    if "codeConfiguration" in artifact:
        raise invalid(
            f"{field}: the local runtime serves files and images, no archives; deploy one of those", field=field
        )
    uri = _object(artifact, "containerConfiguration").get("containerUri")
    if not isinstance(uri, str) or not uri or "\0" in uri:
        raise invalid(f"{field} must be containerConfiguration with a containerUri", field=field)


def _check_variables(variables: Mapping[str, Any]) -> None:
    field = "environmentVariables"
    if len(variables) > 50:
        raise invalid("at most 50 environment variables", field=field)
    for key, value in variables.items():
        if not isinstance(value, str) or not 1 <= len(key) <= 100 or len(value) > 5_000:
            raise invalid(f"{key!r}: names of 1 to 100 characters, values strings of up to 5000", field=field)
        if "=" in key or "\0" in key + value:
            raise invalid(f"{key!r} cannot be an environment variable", field=field)


def _object(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"{name} must be an object", field=name)
    return value or {}


def _one_of(parent: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> None:
    if parent.get(name) not in allowed:
        raise invalid(f"{name} must be one of {', '.join(allowed)}, got {parent.get(name)!r}", field=name)
