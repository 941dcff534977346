"""The control plane: agent runtimes and their endpoints by AWS's API.

Source: botocore service model `bedrock-agentcore-control` 2023-06-05. All paths end with a slash; lists are POST.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..._parsing import parse_json
from ..agents.agent import NAME
from ..agents.registry import DEFAULT, Endpoint, Record, Registry, Version
from ..agents.version_fields import check_fields, check_tags, lifecycle_on_the_wire
from ..wire import WireError, invalid, named


@dataclass(frozen=True)
class Call:
    """One control-plane request, its path matched and its body parsed."""

    operation: str
    runtime: str
    endpoint: str
    query: Mapping[str, str]
    body: Mapping[str, Any]


_RUNTIME, _ENDPOINTS = r"runtimes/(?P<runtime>[^/]+)", r"runtimes/(?P<runtime>[^/]+)/runtime-endpoints"
_ENDPOINT = _ENDPOINTS + r"/(?P<endpoint>[^/]+)"
_ROUTES = (
    ("PUT", "runtimes", "CreateAgentRuntime"),
    ("POST", "runtimes", "ListAgentRuntimes"),
    ("GET", _RUNTIME, "GetAgentRuntime"),
    ("PUT", _RUNTIME, "UpdateAgentRuntime"),
    ("DELETE", _RUNTIME, "DeleteAgentRuntime"),
    ("PUT", _ENDPOINTS, "CreateAgentRuntimeEndpoint"),
    ("POST", _ENDPOINTS, "ListAgentRuntimeEndpoints"),
    ("GET", _ENDPOINT, "GetAgentRuntimeEndpoint"),
    ("PUT", _ENDPOINT, "UpdateAgentRuntimeEndpoint"),
    ("DELETE", _ENDPOINT, "DeleteAgentRuntimeEndpoint"),
    ("GET", "tags/(?P<runtime>.+)", "ListTagsForResource"),
)


def match(method: str, path: Sequence[str]) -> tuple[str, str, str] | None:
    """Operation, runtime id (of tags: the ARN) and endpoint name of a control-plane path, or None when it is none."""
    joined = "/".join(path)
    for verb, pattern, operation in _ROUTES:
        found = re.fullmatch(pattern, joined) if verb == method else None
        if found:
            parts = found.groupdict()
            return operation, parts.get("runtime", ""), parts.get("endpoint", "")
    return None


def parse_body(data: bytes) -> dict[str, Any]:
    """The request's JSON object; nothing is an empty one. Raises: WireError 400."""
    try:
        body = parse_json(data) if data else {}
    except ValueError as e:
        raise invalid(f"The body is not JSON: {e}", reason="CannotParse") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object", reason="CannotParse")
    return body


class ControlPlane:
    """Answers control-plane calls over a registry. ``deploy`` loads a version, ``remove`` ends what runs of a deleted agent.

    ``idle_s`` and ``lifetime_s`` are the limits of sessions whose agent sets none.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        deploy: Callable[[Record, Version], Awaitable[None]],
        remove: Callable[[Record], Awaitable[None]],
        idle_s: float,
        lifetime_s: float,
    ) -> None:
        self.registry = registry
        self._load, self._end = deploy, remove
        self._idle_s, self._lifetime_s = idle_s, lifetime_s
        self._handlers: dict[str, Callable[[Call], Awaitable[tuple[int, dict[str, Any]]]]] = {
            "CreateAgentRuntime": self._create,
            "GetAgentRuntime": self._get,
            "UpdateAgentRuntime": self._update,
            "DeleteAgentRuntime": self._delete,
            "ListAgentRuntimes": self._list,
            "CreateAgentRuntimeEndpoint": self._create_endpoint,
            "GetAgentRuntimeEndpoint": self._get_endpoint,
            "UpdateAgentRuntimeEndpoint": self._update_endpoint,
            "DeleteAgentRuntimeEndpoint": self._delete_endpoint,
            "ListAgentRuntimeEndpoints": self._list_endpoints,
            "ListTagsForResource": self._list_tags,
        }

    async def call(self, call: Call) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the reply. Raises: WireError."""
        return await self._handlers[call.operation](call)

    # -- runtimes
    async def _create(self, call: Call) -> tuple[int, dict[str, Any]]:
        name = call.body.get("agentRuntimeName")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise invalid(f"agentRuntimeName must match {NAME.pattern}", field="agentRuntimeName")
        fields, tags = check_fields(call.body), check_tags(call.body.get("tags"))
        record = self.registry.create(name, fields, tags=tags)
        version = record.latest
        reply = {**self._identity(record, version), "createdAt": iso(version.created_s), "status": "CREATING"}
        await self._load(record, version)
        return 202, reply

    async def _update(self, call: Call) -> tuple[int, dict[str, Any]]:
        record = self.registry.get(call.runtime)
        version = self.registry.update(record, check_fields(call.body))
        reply = {
            **self._identity(record, version),
            "createdAt": iso(record.created_s),
            "lastUpdatedAt": iso(version.created_s),
            "status": "UPDATING",
        }
        await self._load(record, version)
        return 202, reply

    async def _get(self, call: Call) -> tuple[int, dict[str, Any]]:
        record = self.registry.get(call.runtime)
        version = record.version(_number(call.query["version"])) if "version" in call.query else record.latest
        reply = {
            **self._identity(record, version),
            "agentRuntimeName": record.name,
            "createdAt": iso(version.created_s),
            "lastUpdatedAt": iso(version.updated_s or version.created_s),
            "status": version.status,
            "platformVersion": "V2",
            **version.fields,
            "lifecycleConfiguration": lifecycle_on_the_wire(version.fields, self._idle_s, self._lifetime_s),
        }
        if version.failure is not None:
            reply["failureReason"] = version.failure
        return 200, reply

    async def _delete(self, call: Call) -> tuple[int, dict[str, Any]]:
        record = self.registry.get(call.runtime)
        if "version" in call.query:
            raise invalid("the local runtime deletes agent runtimes whole; leave version out", field="version")
        del self.registry.records[record.id]
        await self._end(record)
        return 202, {"status": "DELETING", "agentRuntimeId": record.id}

    async def _list(self, call: Call) -> tuple[int, dict[str, Any]]:
        records = sorted(self.registry.records.values(), key=lambda r: (-r.created_s, r.id))
        return 200, {"agentRuntimes": [self._summary(r, r.latest) for r in records]}

    def _identity(self, record: Record, version: Version) -> dict[str, Any]:
        return {
            "agentRuntimeArn": self.registry.arn(record.id),
            "agentRuntimeId": record.id,
            "agentRuntimeVersion": str(version.number),
        }

    def _summary(self, record: Record, version: Version) -> dict[str, Any]:
        return {
            **self._identity(record, version),
            "agentRuntimeName": record.name,
            "description": version.fields.get("description", ""),
            "lastUpdatedAt": iso(version.updated_s or version.created_s),
            "status": version.status,
        }

    # -- endpoints
    async def _create_endpoint(self, call: Call) -> tuple[int, dict[str, Any]]:
        name = call.body.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise invalid(f"name must match {NAME.pattern}", field="name")
        number, tags = call.body.get("agentRuntimeVersion"), check_tags(call.body.get("tags"))
        record = self.registry.get(call.runtime)
        if name in record.endpoints:
            raise WireError("ConflictException", f"Endpoint {name} already exists")
        version, now = record.latest if number is None else record.version(_number(number)), time.time()
        record.endpoints[name] = Endpoint(name, version.number, now, now, tags)
        return 202, {
            **self._endpoint_arns(call.runtime, name),
            "targetVersion": str(version.number),
            "agentRuntimeId": call.runtime,
            "endpointName": name,
            "status": "CREATING",
            "createdAt": iso(now),
        }

    async def _get_endpoint(self, call: Call) -> tuple[int, dict[str, Any]]:
        return 200, self._describe(record := self.registry.get(call.runtime), record.endpoint(call.endpoint))

    async def _update_endpoint(self, call: Call) -> tuple[int, dict[str, Any]]:
        record = self.registry.get(call.runtime)
        endpoint = record.endpoint(call.endpoint)
        if call.endpoint == DEFAULT:
            raise WireError("ConflictException", "The DEFAULT endpoint always follows the latest version")
        if call.body.get("agentRuntimeVersion") is not None:
            version = record.version(_number(call.body["agentRuntimeVersion"]))
            if version.status != "READY":
                why = version.failure or "it is being loaded"
                raise WireError("ConflictException", f"Version {version.number} is not ready: {why}")
            endpoint.version = version.number
        endpoint.updated_s = time.time()
        return 202, {**self._describe(record, endpoint), "status": "UPDATING"}

    async def _delete_endpoint(self, call: Call) -> tuple[int, dict[str, Any]]:
        record = self.registry.get(call.runtime)
        record.endpoint(call.endpoint)
        if call.endpoint == DEFAULT:
            raise WireError("ConflictException", "The DEFAULT endpoint cannot be deleted")
        del record.endpoints[call.endpoint]
        return 202, {"status": "DELETING", "agentRuntimeId": call.runtime, "endpointName": call.endpoint}

    async def _list_endpoints(self, call: Call) -> tuple[int, dict[str, Any]]:
        record = self.registry.get(call.runtime)
        endpoints = sorted(record.endpoints.values(), key=lambda e: e.created_s)
        return 200, {"runtimeEndpoints": [self._describe(record, e) for e in endpoints]}

    async def _list_tags(self, call: Call) -> tuple[int, dict[str, Any]]:
        resource = named(call.runtime, None)
        record = self.registry.find(resource)
        holder = record if resource.endpoint is None else record.endpoint(resource.endpoint)
        return 200, {"tags": holder.tags}

    def _endpoint_arns(self, runtime: str, name: str) -> dict[str, str]:
        arn = self.registry.arn(runtime)
        return {"agentRuntimeEndpointArn": f"{arn}/runtime-endpoint/{name}", "agentRuntimeArn": arn}

    def _describe(self, record: Record, endpoint: Endpoint) -> dict[str, Any]:
        return {
            **self._endpoint_arns(record.id, endpoint.name),
            "name": endpoint.name,
            "id": endpoint.name,
            "liveVersion": str(endpoint.version),
            "targetVersion": str(endpoint.version),
            "status": record.versions[endpoint.version].status,
            "createdAt": iso(endpoint.created_s),
            "lastUpdatedAt": iso(endpoint.updated_s),
        }


def iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _number(text: Any) -> int:
    if not isinstance(text, str) or not text.isdecimal():
        raise invalid(f"{text!r} is not a version", field="agentRuntimeVersion")
    return int(text)
