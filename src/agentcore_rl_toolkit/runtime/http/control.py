"""The control plane: agent runtimes and their endpoints by AWS's API.

Source: botocore service model `bedrock-agentcore-control` 2023-06-05. All paths end with a slash; lists are POST.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope, Send

from ..agents.agent import NAME
from ..agents.registry import DEFAULT, Endpoint, Record, Version
from ..agents.version_fields import check_fields, check_tags, lifecycle_on_the_wire
from ..runtime import Runtime
from ..wire import WireError, invalid, named
from .responses import parse_object, query_of, reply_json

Reply = tuple[int, dict[str, Any]]
_ENDPOINTS = "/runtimes/{runtime}/runtime-endpoints"


@dataclass(frozen=True)
class Call:
    """One control-plane request."""

    runtime: str
    endpoint: str
    query: Mapping[str, str]
    body: Mapping[str, Any]


def routes(runtime: Runtime) -> Iterator[tuple[str, str, str, Callable[[Scope, Send], Awaitable[None]]]]:
    """Method, path, operation and endpoint of each."""
    plane = ControlPlane(runtime)
    for method, path, operation, answer in (
        ("PUT", "/runtimes", "CreateAgentRuntime", plane.create),
        ("POST", "/runtimes", "ListAgentRuntimes", plane.list),
        ("GET", "/runtimes/{runtime}", "GetAgentRuntime", plane.get),
        ("PUT", "/runtimes/{runtime}", "UpdateAgentRuntime", plane.update),
        ("DELETE", "/runtimes/{runtime}", "DeleteAgentRuntime", plane.delete),
        ("PUT", _ENDPOINTS, "CreateAgentRuntimeEndpoint", plane.create_endpoint),
        ("POST", _ENDPOINTS, "ListAgentRuntimeEndpoints", plane.list_endpoints),
        ("GET", _ENDPOINTS + "/{endpoint}", "GetAgentRuntimeEndpoint", plane.get_endpoint),
        ("PUT", _ENDPOINTS + "/{endpoint}", "UpdateAgentRuntimeEndpoint", plane.update_endpoint),
        ("DELETE", _ENDPOINTS + "/{endpoint}", "DeleteAgentRuntimeEndpoint", plane.delete_endpoint),
        ("GET", "/tags/{runtime:path}", "ListTagsForResource", plane.list_tags),
    ):
        yield method, path, operation, _endpoint(answer)


def _endpoint(answer: Callable[[Call], Awaitable[Reply]]) -> Callable[[Scope, Send], Awaitable[None]]:
    async def respond(scope: Scope, send: Send) -> None:
        found, body = scope["path_params"], parse_object(b"".join(scope["runtime.body"]))
        call = Call(found.get("runtime", ""), found.get("endpoint", ""), query_of(scope), body)
        status, content = await answer(call)
        await reply_json(send, content, status)

    return respond


class ControlPlane:
    """Answers control-plane calls over the agents of a runtime. Each method raises WireError."""

    def __init__(self, runtime: Runtime) -> None:
        self.registry = runtime.registry
        self._load, self._end, self._times = runtime.deploy, runtime.remove, runtime.config.times

    # -- runtimes
    async def create(self, call: Call) -> Reply:
        name = call.body.get("agentRuntimeName")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise invalid(f"agentRuntimeName must match {NAME.pattern}", field="agentRuntimeName")
        fields, tags = check_fields(call.body), check_tags(call.body.get("tags"))
        record = self.registry.create(name, fields, tags=tags)
        version = record.latest
        reply = {**self._identity(record, version), "createdAt": iso(version.created_s), "status": "CREATING"}
        await self._load(record, version)
        return 202, reply

    async def update(self, call: Call) -> Reply:
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

    async def get(self, call: Call) -> Reply:
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
            "lifecycleConfiguration": lifecycle_on_the_wire(
                version.fields, self._times.idle_timeout_s, self._times.max_lifetime_s
            ),
        }
        if version.failure is not None:
            reply["failureReason"] = version.failure
        return 200, reply

    async def delete(self, call: Call) -> Reply:
        record = self.registry.get(call.runtime)
        if "version" in call.query:
            raise invalid("the local runtime deletes agent runtimes whole; leave version out", field="version")
        del self.registry.records[record.id]
        await self._end(record)
        return 202, {"status": "DELETING", "agentRuntimeId": record.id}

    async def list(self, call: Call) -> Reply:
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
    async def create_endpoint(self, call: Call) -> Reply:
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

    async def get_endpoint(self, call: Call) -> Reply:
        return 200, self._describe(record := self.registry.get(call.runtime), record.endpoint(call.endpoint))

    async def update_endpoint(self, call: Call) -> Reply:
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

    async def delete_endpoint(self, call: Call) -> Reply:
        record = self.registry.get(call.runtime)
        record.endpoint(call.endpoint)
        if call.endpoint == DEFAULT:
            raise WireError("ConflictException", "The DEFAULT endpoint cannot be deleted")
        del record.endpoints[call.endpoint]
        return 202, {"status": "DELETING", "agentRuntimeId": call.runtime, "endpointName": call.endpoint}

    async def list_endpoints(self, call: Call) -> Reply:
        record = self.registry.get(call.runtime)
        endpoints = sorted(record.endpoints.values(), key=lambda e: e.created_s)
        return 200, {"runtimeEndpoints": [self._describe(record, e) for e in endpoints]}

    async def list_tags(self, call: Call) -> Reply:
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
