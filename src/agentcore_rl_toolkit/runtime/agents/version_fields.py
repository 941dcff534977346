"""The fields of an agent version: those that a request may set, and those that this runtime refuses.

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
_NOT_SERVED = ("authorizerConfiguration", "filesystemConfigurations", "capacityProviderConfiguration")
_OF_THE_RUNTIME = ("agentRuntimeName", "clientToken", "tags")  # fields that do not belong to a version


def check_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a version. Raises: WireError 400 for fields that are not served here."""
    for name in _NOT_SERVED:
        if body.get(name):
            raise invalid(f"{name} is not supported by the local runtime; leave it out here", field=name)
    fields = {name: value for name, value in body.items() if value is not None and name not in _OF_THE_RUNTIME}
    if "containerConfiguration" not in fields.get("agentRuntimeArtifact", {}):
        why = "the local runtime serves files and images, but not archives; give containerConfiguration with a containerUri"
        raise invalid(f"agentRuntimeArtifact: {why}", field="agentRuntimeArtifact")
    if fields.get("protocolConfiguration", {}).get("serverProtocol", "HTTP") not in ("HTTP", "AGUI"):
        raise invalid("the local runtime serves the protocols HTTP and AGUI", field="protocolConfiguration")
    lifecycle = fields.get("lifecycleConfiguration", {})
    for name in (IDLE, LIFETIME):
        if not LIFETIME_MIN_S <= lifecycle.get(name, LIFETIME_MIN_S) <= LIFETIME_MAX_S:
            raise invalid(f"{name} must be {LIFETIME_MIN_S} to {LIFETIME_MAX_S} seconds", field=name)
    if lifecycle.get(IDLE, LIFETIME_MIN_S) > lifecycle.get(LIFETIME, LIFETIME_MAX_S):
        raise invalid(f"{IDLE} must not exceed {LIFETIME}", field="lifecycleConfiguration")
    return {"networkConfiguration": {"networkMode": "PUBLIC"}, **fields, "lifecycleConfiguration": lifecycle}
