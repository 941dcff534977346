"""The fields of an agent version, and tags: what AWS's service model allows of them, and what is not served here.

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
_PATH = re.compile(r"/[A-Za-z0-9\-._~/%]*")
_TAG = re.compile(r"[\w\s.:/=+@-]*", re.ASCII)
_PORTS, _TLS_PORT = (8_000, 12_000), 8443


def check_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a version. Raises: WireError 400 for what AWS refuses, and for what is not served here."""
    for name, why in _NOT_SERVED.items():
        if body.get(name):
            raise invalid(f"{name} is not served by the local runtime ({why}); leave it out here", field=name)
    role = _text(body, "roleArn", 2_048)
    if not _ROLE.fullmatch(role):
        raise invalid(f"roleArn must be like arn:aws:iam::123456789012:role/NAME, got {role!r}", field="roleArn")
    _check_artifact(_object(body, "agentRuntimeArtifact", required=True))
    network = _object(body, "networkConfiguration") or {"networkMode": "PUBLIC"}
    _one_of(network, "networkMode", ("PUBLIC", "VPC"))
    if body.get("description") is not None:
        _text(body, "description", 4_096)
    _check_headers(_object(body, "requestHeaderConfiguration"))
    _check_protocol(_object(body, "protocolConfiguration"))
    _check_variables(_object(body, "environmentVariables") or {})
    fields = {name: body[name] for name in _STORED if body.get(name) is not None}
    fields["lifecycleConfiguration"] = check_lifecycle(body.get("lifecycleConfiguration"))
    fields["networkConfiguration"] = network
    return fields


def check_tags(tags: Any) -> dict[str, str]:
    """Tags of a request, none for None. Raises: WireError 400."""
    given = {} if tags is None else tags
    if not isinstance(given, dict) or len(given) > MAX_TAGS:
        raise invalid(f"tags must be an object of at most {MAX_TAGS} strings", field="tags")
    for key, value in given.items():
        good = isinstance(value, str) and 1 <= len(key) <= 128 and len(value) <= 256
        if not good or not (_TAG.fullmatch(key) and _TAG.fullmatch(value)):
            raise invalid(f"tag {key!r}: names of 1 to 128, values of up to 256 characters _.:/=+@-", field="tags")
    return dict(given)


def refuse_more_tags(tags: Mapping[str, str]) -> None:
    """Raises: WireError 402 above the limit."""
    if len(tags) > MAX_TAGS:
        raise WireError("ServiceQuotaExceededException", f"{MAX_TAGS} tags per resource are the limit")


def _check_artifact(artifact: Mapping[str, Any]) -> None:
    field = "agentRuntimeArtifact"
    if "codeConfiguration" in artifact:
        raise invalid(
            f"{field}: the local runtime serves files and images, no archives; deploy one of those", field=field
        )
    if set(artifact) != {"containerConfiguration"}:
        raise invalid(f"{field} must be containerConfiguration", field=field)
    container = _object(artifact, "containerConfiguration", required=True)
    _text(container, "containerUri", 4_096 if _is_local(container.get("containerUri")) else 1_024)


def _check_headers(configuration: Mapping[str, Any]) -> None:
    field = "requestHeaderAllowlist"
    names = configuration.get(field, []) if configuration else []
    if not isinstance(names, list) or len(names) > 20 or (configuration and not names):
        raise invalid(f"{field} must be 1 to 20 header names", field=field)
    for name in names:
        if not isinstance(name, str) or not _HEADER.fullmatch(name):
            raise invalid(f"{field}: {name!r} is no header name", field=field)


def _check_protocol(configuration: Mapping[str, Any]) -> None:
    if not configuration:
        return
    _one_of(configuration, "serverProtocol", ("HTTP", "MCP", "A2A", "AGUI"))
    port, path = configuration.get("port"), configuration.get("path")
    if port is not None and (type(port) is not int or not _PORTS[0] <= port <= _PORTS[1] or port == _TLS_PORT):
        raise invalid(f"port must be {_PORTS[0]} to {_PORTS[1]} and not {_TLS_PORT}", field="port")
    if path is not None and not (_is_text(path, 2_048) and _PATH.fullmatch(path)):
        raise invalid(f"path must begin with / and hold letters, digits and -._~/% only, got {path!r}", field="path")


def _check_variables(variables: Mapping[str, Any]) -> None:
    field = "environmentVariables"
    if len(variables) > 50:
        raise invalid("at most 50 environment variables", field=field)
    for key, value in variables.items():
        if not isinstance(value, str) or not 1 <= len(key) <= 100 or len(value) > 5_000:
            raise invalid(f"{key!r}: names of 1 to 100 characters, values strings of up to 5000", field=field)
        if "=" in key or "\0" in key + value or not _encodes(key + value):
            raise invalid(f"{key!r} cannot be an environment variable", field=field)


def _encodes(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _is_local(uri: Any) -> bool:
    return isinstance(uri, str) and uri.startswith(LOCAL_ARTIFACT)


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= longest and "\0" not in value and _encodes(value)


def _text(parent: Mapping[str, Any], name: str, longest: int) -> str:
    if not _is_text(parent.get(name), longest):
        raise invalid(f"{name} must be a string of 1 to {longest} characters", field=name)
    return str(parent[name])


def _object(parent: Mapping[str, Any], name: str, *, required: bool = False) -> dict[str, Any]:
    value = parent.get(name)
    if value is None and not required:
        return {}
    if not isinstance(value, dict) or (required and not value):
        raise invalid(f"{name} {'is required and ' if required else ''}must be an object", field=name)
    return value


def _one_of(parent: Mapping[str, Any], name: str, allowed: tuple[str, ...]) -> None:
    if parent.get(name) not in allowed:
        raise invalid(f"{name} must be one of {', '.join(allowed)}, got {parent.get(name)!r}", field=name)
