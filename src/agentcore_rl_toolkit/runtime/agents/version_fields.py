"""The fields of an agent version, and tags: those that a request may set, and those that this runtime refuses.

Source: botocore service model `bedrock-agentcore-control` 2023-06-05. AWS's clients check types by it. Fields that this runtime
cannot serve are refused, so that no agent runs without its authorizer or file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..wire import invalid

LOCAL_ARTIFACT = "local://"
IDLE, LIFETIME = "idleRuntimeSessionTimeout", "maxLifetime"
LIFETIME_MIN_S, LIFETIME_MAX_S = 60, 28_800
_NOT_SERVED = {
    "authorizerConfiguration": "callers would not be asked for a token",
    "filesystemConfigurations": "nothing would be mounted",
    "capacityProviderConfiguration": "sessions run on this machine",
    "allowedPorts": "sessions share the ports of this machine",
    "hooksConfiguration": "no hook would run",
}
_OBJECTS = (
    "agentRuntimeArtifact",
    "networkConfiguration",
    "requestHeaderConfiguration",
    "protocolConfiguration",
    "environmentVariables",
    "lifecycleConfiguration",
)
_OTHERS = ("roleArn", "description", "metadataConfiguration", "platformVersion", "resourceConfigurations")


def check_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a version. Raises: WireError 400 for unreadable fields and for fields that are not served here."""
    for name, why in _NOT_SERVED.items():
        if body.get(name):
            raise invalid(f"{name} is not supported by the local runtime ({why}); leave it out here", field=name)
    fields = {name: body[name] for name in (*_OBJECTS, *_OTHERS) if body.get(name) is not None}
    for name in _OBJECTS:
        if not isinstance(fields.get(name, {}), dict):
            raise invalid(f"{name} must be an object", field=name)
    artifact = fields.get("agentRuntimeArtifact", {})
    if not isinstance((artifact.get("containerConfiguration") or {}).get("containerUri"), str):
        why = "the local runtime serves files and images, but not archives; give containerConfiguration with a containerUri"
        raise invalid(f"agentRuntimeArtifact: {why}", field="agentRuntimeArtifact")
    for key, value in fields.get("environmentVariables", {}).items():
        if not isinstance(value, str) or not key or "=" in key or "\0" in key + value:
            raise invalid(f"{key!r} cannot be an environment variable", field="environmentVariables")
    lifecycle = {k: v for k, v in fields.get("lifecycleConfiguration", {}).items() if v is not None}
    for name in (IDLE, LIFETIME):
        value = lifecycle.get(name, LIFETIME_MIN_S)
        if type(value) is not int or not LIFETIME_MIN_S <= value <= LIFETIME_MAX_S:
            raise invalid(f"{name} must be {LIFETIME_MIN_S} to {LIFETIME_MAX_S} seconds", field=name)
    if lifecycle.get(IDLE, 0) > lifecycle.get(LIFETIME, LIFETIME_MAX_S):
        raise invalid(f"{IDLE} must not exceed {LIFETIME}", field="lifecycleConfiguration")
    return {"networkConfiguration": {"networkMode": "PUBLIC"}, **fields, "lifecycleConfiguration": lifecycle}


def check_tags(tags: Any) -> dict[str, str]:
    """Return the tags of a request, none for None. Raises: WireError 400."""
    given = {} if tags is None else tags
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise invalid("tags must be an object of strings", field="tags")
    return dict(given)
