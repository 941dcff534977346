"""The fields of an agent version, and tags: those that a request may set, and those that this runtime refuses.

Source: botocore service model `bedrock-agentcore-control` 2023-06-05. AWS's clients check types by it. Fields that this runtime
cannot serve are refused, so that no agent runs without its authorizer or file system.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..wire import invalid

LOCAL_ARTIFACT = "local://"
LIFETIME_MIN_S, LIFETIME_MAX_S = 60, 28_800
_IDLE, _LIFETIME = "idleRuntimeSessionTimeout", "maxLifetime"
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
    fields["lifecycleConfiguration"] = _lifecycle(fields.get("lifecycleConfiguration", {}))
    fields.setdefault("networkConfiguration", {"networkMode": "PUBLIC"})
    return fields


def _lifecycle(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the limits of sessions that a request sets. Raises: WireError 400."""
    kept = {name: given[name] for name in (_IDLE, _LIFETIME) if given.get(name) is not None}
    for name, value in kept.items():
        if type(value) is not int or not LIFETIME_MIN_S <= value <= LIFETIME_MAX_S:
            raise invalid(f"{name} must be {LIFETIME_MIN_S} to {LIFETIME_MAX_S} seconds", field=name)
    if len(kept) == 2 and kept[_IDLE] > kept[_LIFETIME]:
        raise invalid(f"{_IDLE} must not exceed {_LIFETIME}", field="lifecycleConfiguration")
    return kept


def lifecycle_of(fields: Mapping[str, Any], idle_s: float, lifetime_s: float) -> tuple[float, float]:
    """Return the seconds that sessions of a version may idle and live. ``idle_s`` and ``lifetime_s`` are the platform's own.

    A default idle timeout is never above a given lifetime. Source: AWS, "Configure lifecycle settings".
    """
    given = fields.get("lifecycleConfiguration", {})
    lifetime = given.get(_LIFETIME, lifetime_s)
    return given.get(_IDLE, min(idle_s, lifetime) if _LIFETIME in given else idle_s), lifetime


def lifecycle_on_the_wire(idle_s: float, lifetime_s: float) -> dict[str, int]:
    """Return both limits as the API names and types them: whole seconds, rounded up."""
    return {_IDLE: math.ceil(idle_s), _LIFETIME: math.ceil(lifetime_s)}


def check_tags(tags: Any) -> dict[str, str]:
    """Return the tags of a request, none for None. Raises: WireError 400."""
    given = {} if tags is None else tags
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise invalid("tags must be an object of strings", field="tags")
    return dict(given)
